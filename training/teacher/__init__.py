"""GEM as a teacher: its predictions and embeddings, written as tables that rankers learn from."""
