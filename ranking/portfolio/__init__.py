"""Which pairs of surface and objective share a model, which features it reads, and its size."""
