"""Examples to GEM, the foundation model over all surfaces, and the knowledge that it emits."""
