"""Distillation of GEM into a student: predictions, losses, and a warm start from weights."""
