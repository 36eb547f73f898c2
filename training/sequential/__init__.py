"""Sequences of a user's events in files: a benchmark's layout, from CSV to one logit a row."""
