"""Forecasts of the reach and the performance of a campaign under a targeting."""
