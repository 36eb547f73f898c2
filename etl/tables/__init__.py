"""Tables: their contracts, and the only place that knows Delta."""
