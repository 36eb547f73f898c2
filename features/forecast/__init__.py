"""The tables of a forecast: a sample of scored impressions, counts of segments, sketches."""
