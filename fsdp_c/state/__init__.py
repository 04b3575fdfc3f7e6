"""State dicts of models and optimizers: values of units in the shapes and under the FQNs of the user's model."""
