"""Training of rankers: a student, its calibration, its export, and its refit on newer labels."""
