"""Encoding of raw attribute values as model inputs, in Spark and one value at a time."""
