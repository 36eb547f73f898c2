"""Benchmarks on files in public layouts: KuaiRand, plain tables, and user sequences.

Models with one logit are trained with early stopping and compared with LightGBM and others.
"""
