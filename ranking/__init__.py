"""GEM's knowledge to one small, calibrated ranker per surface."""
