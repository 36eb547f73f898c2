"""The arrays that a ranker reads, built the same in training and in serving."""
