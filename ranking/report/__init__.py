"""The report of a run: one HTML page on what to do next, model quality, calibration and ingest."""
