"""Construction of sharded modules: auto wrapping, units and flat parameters."""
