"""The dense model, in torch alone: one file an idea."""
