"""How a model is spread over processes; applied from outside of the model."""
