"""Off-policy evaluation: what a ranker's order would have brought, estimated from logged requests.

`evaluation` reads logged requests and ranks their ads with a ranker, `estimators` has the inverse
propensity scoring and the ranking metrics.
"""
