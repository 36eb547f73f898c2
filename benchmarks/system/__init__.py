"""Benchmarks of throughput, latency, storage and recovery, compared with alternatives or limits."""
