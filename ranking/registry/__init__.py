"""Versioned folders of rankers: export, verification, loading without torch, promotion."""
