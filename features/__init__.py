"""Clean tables to user histories, item index, counters and examples. Owns time-correctness."""
