"""Labeled impressions: requests, attribution of outcomes, and label windows."""
