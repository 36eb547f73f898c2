"""From raw logs to clean, labelled Delta tables: the data spec, table schemas and Spark session."""
