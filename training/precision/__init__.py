"""FP8 where it is safe: probes, errors by recipe, and a map of recipes (LoKA 2605.10886)."""
