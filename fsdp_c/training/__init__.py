"""Python code around the steps in C: inputs, outputs, order, clipping, summon_full_params, checks."""
