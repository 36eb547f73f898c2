"""Off-policy evaluation: the value of a ranker's order, estimated from logged requests.

`evaluation` reads logged requests and ranks their ads with a ranker, `estimators` has the inverse
propensity scoring and the ranking metrics.
"""
