"""From a user's module to sharded ones: wrapping, construction, flat parameters."""
