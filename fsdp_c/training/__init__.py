"""Around the steps that C runs: inputs and outputs, the order of units, whole parameters and gradients
between them."""
