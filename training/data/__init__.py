"""From tables to batches: the pointer join, request-shaped, without a JVM."""
