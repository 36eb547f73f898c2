"""The sequence side: events in, encoded events and rows of what they tell out.

N events of R requests, one after another, cut by offsets (R+1); W width of an event, H heads, D
width of a head. Nothing is padded.
"""
