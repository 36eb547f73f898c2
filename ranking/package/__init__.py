"""A ranker's folder, and the ranker in it: nothing of training, and no torch."""
