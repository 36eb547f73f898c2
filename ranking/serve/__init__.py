"""The HTTP service: rankings of live requests, and events that feed the store."""
