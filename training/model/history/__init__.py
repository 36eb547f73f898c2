"""A user's event history: event tokens, search by attribute, recency, and their encoder."""
