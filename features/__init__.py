"""Features as of each impression: user histories, the item index, counters and `examples`."""
