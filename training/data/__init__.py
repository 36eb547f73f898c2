"""From tables to batches: partitions of examples, the history pointer join, shards, windows."""
