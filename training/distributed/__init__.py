"""Process groups and parallelism, applied to a model from outside: DDP, FSDP, sharded tables."""
