"""Cost model of training on many GPUs: memory, step time and scaling by sharding scheme."""
