"""How training would go on more GPUs: a plan on paper."""
