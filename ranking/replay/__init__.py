"""Logged requests in a ranker's order: what it would have brought, from the log alone."""
