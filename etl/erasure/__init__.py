"""Erasing users: their rows in all tables, and raw records that would bring them back."""
