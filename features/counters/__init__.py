"""Point-in-time counters: aggregations of the events before each impression, by key."""
