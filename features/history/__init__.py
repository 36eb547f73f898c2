"""Each user's events, stored once, packed, in order of visibility."""
