"""Where raw records come from: event logs, impression logs, attribute files, the simulator."""
