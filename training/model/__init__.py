"""GEM as plain torch modules: embeddings, history encoder, interactions and heads."""
