"""Optimizers over shards that need whole parameters, and averages of parameters."""

from fsdp_c.state.parameter_average import ParameterAverage
from fsdp_c.state.whole_parameters import WholeParameters

__all__ = ["ParameterAverage", "WholeParameters"]
