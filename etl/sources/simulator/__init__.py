"""Simulated people, ads and logs: raw records with a known truth behind them."""
