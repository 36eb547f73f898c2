"""Ingestion: from raw log files to the events, quarantine and excluded_events tables."""
