"""The non-sequence side alone, on plain tables: for benchmarks in the public layout."""
