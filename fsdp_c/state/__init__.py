"""State dicts of models and optimizers: what a unit holds, in the shapes and under the names of the user's
model."""
