"""State dicts of models and optimizers: what units hold, in shapes and under names of the user's model."""
