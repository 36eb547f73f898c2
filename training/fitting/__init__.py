"""Models of one logit on files: trained with early stopping, for benchmarks in public layouts."""
