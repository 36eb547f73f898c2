"""Baselines that GEM is compared with."""
