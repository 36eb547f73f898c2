"""Campaign days: what campaigns spent, and what their impressions brought."""
