"""Optimizers over shards that need full parameters."""

from fsdp_c.optim.whole_parameters import WholeParameters

__all__ = ["WholeParameters"]
