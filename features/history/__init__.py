"""The `history` table: each user's events, stored once, packed, in order of visibility."""
