"""Sequence modules: attention, layers, pooling, the pyramid and InterFormer.

N events of R requests, one request after another, cut by offsets (R + 1); W width of an event, H
heads, D width of a head. Nothing is padded.
"""
