"""Simulator of users, ads and logs: raw records with known outcome probabilities."""
