"""The training loop of GEM: steps, checkpoints, resumption, throughput and tracking."""
