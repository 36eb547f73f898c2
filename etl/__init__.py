"""Logs to clean, labelled tables. Owns the data spec, the table contracts and the Spark session."""
