"""Benchmarks: on public data sets, long studies of model quality, and system performance."""
