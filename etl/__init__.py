"""From raw logs to clean, labeled Delta tables: the data spec, table schemas and Spark session."""
