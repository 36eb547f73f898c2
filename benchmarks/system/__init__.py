"""Benchmarks of throughput, latency, storage and recovery, beside an alternative or a limit."""
