"""The small model of a surface, and how it learns from GEM."""
