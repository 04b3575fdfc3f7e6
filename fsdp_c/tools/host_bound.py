"""Where the host decides how long a step takes: units so small that the device waits for launches.

What is assumed stands in the numbers that are given: the host's costs, measured by ``fsdp_c.host_cost``; the
tokens of a rank's batch, each of which meets each parameter once; and the floating-point operations that the
device really does per second. As products of matrices do, a step takes 6 of them per parameter and token, 2
in the forward and 4 in the backward, of which 2 are left out where the unit is frozen. Communication,
memory-bound kernels and recomputation are not counted: they keep the device busy for longer, so that fewer
units leave it waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

TRAINED_OPERATIONS = 6  # per parameter and token
FROZEN_OPERATIONS = 4


class HostCost(NamedTuple):
    """What a unit takes of the host's time in a step, with the model's own operators, in microseconds."""

    unit_us: float  # of the unit itself
    param_us: float  # of each of its parameters


class HostUnit(NamedTuple):
    """One unit."""

    numel: int
    num_params: int
    is_trainable: bool


class HostBound(NamedTuple):
    """What comes out. Times are of one step, in microseconds."""

    host_us: float
    device_us: float
    least_numel: int  # a unit of the usual number of parameters with fewer elements leaves the device waiting
    waiting: int  # units that do
    units: int

    def __str__(self) -> str:
        """For example: the host takes 9.0 ms of a step, and the device computes for 45.0 ms; no unit is so
        small ..."""
        which = f"{self.waiting} of {self.units} units leave" if self.waiting else "no unit leaves"
        return (
            f"the host takes {self.host_us / 1e3:.1f} ms of a step, and the device computes for "
            f"{self.device_us / 1e3:.1f} ms; {which} the device waiting for the host, as units of fewer than "
            f"about {float(f'{self.least_numel:.2g}'):,.0f} parameters do"
        )


def host_bound(units: Sequence[HostUnit], cost: HostCost, *, tokens: int, flops: float) -> HostBound:
    """Compare the two, unit by unit. ValueError for tokens, flops or costs that are not more than nothing."""
    for name, value in (("tokens", tokens), ("flops", flops), ("unit_us", cost.unit_us)):
        if not value > 0:
            raise ValueError(f"{name} must be more than 0, not {value}")
    if cost.param_us < 0:
        raise ValueError(f"param_us must be at least 0, not {cost.param_us}")
    host = [cost.unit_us + unit.num_params * cost.param_us for unit in units]
    operations = [TRAINED_OPERATIONS if unit.is_trainable else FROZEN_OPERATIONS for unit in units]
    device = [unit.numel * tokens * each / flops * 1e6 for unit, each in zip(units, operations, strict=True)]
    usual = statistics.median(unit.num_params for unit in units) if units else 0
    return HostBound(
        sum(host),
        sum(device),
        round((cost.unit_us + usual * cost.param_us) / 1e6 * flops / (tokens * TRAINED_OPERATIONS)),
        sum(launched > computed for launched, computed in zip(host, device, strict=True)),
        len(units),
    )
