"""The training loop: step, checkpoint, metrics, tracking."""
