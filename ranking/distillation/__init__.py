"""How a student learns from GEM: its predictions, losses, a warm start from its weights."""
