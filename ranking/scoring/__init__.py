"""From logits to a ranking: calibration, bids, the auction, and batch scores."""
