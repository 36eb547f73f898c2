"""Features of live requests: the same as offline, from an embedded store that events feed."""
