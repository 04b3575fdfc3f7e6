"""Checks for DistributedDataParallel around a root: DDP needs unsharded gradients of flat parameters."""

from __future__ import annotations

import warnings

from torch.nn.parallel import DistributedDataParallel

from fsdp_c.sharding.sharded_module import ShardedModule, handles_in


def check_ddp(root: ShardedModule, ddp: DistributedDataParallel) -> None:
    """Check that ``ddp`` averages the gradients of ``root``. Called before the first forward inside ``ddp``.

    Raises RuntimeError if ``ddp`` manages a trained parameter whose gradient is sharded or offloaded. Warns
    (UserWarning) if autograd does not reach the parameter that ``ddp`` manages.
    """
    managed = {id(param) for param in getattr(ddp, "_module_parameters", None) or ()}
    for handle in handles_in(root):
        is_whole = not handle.uses_sharded_strategy and not handle._offload_params
        is_reached = not handle._use_orig_params and not handle._uses_param_mixed_precision
        params = handle.script_params
        is_trained = id(params[0]) in managed and any(param.requires_grad for param in params)
        if (is_whole and is_reached) or not is_trained:
            continue
        if handle._use_orig_params or is_whole:  # FSDP1 trains on silently here: warn, do not raise
            kind = "original parameters" if handle._use_orig_params else "flat parameters of low precision"
            warnings.warn(
                f"rank {handle.rank}, unit {handle.name}: DistributedDataParallel never averages its gradients, "
                f"as autograd does not reach {kind}: replicas drift apart. Use HYBRID_SHARD in place of "
                "DistributedDataParallel, or a group of one rank, use_orig_params=False and full precision",
                stacklevel=2,
            )
            continue
        why = "sharded, with a different part on each rank" if handle.uses_sharded_strategy else "offloaded"
        raise RuntimeError(
            f"rank {handle.rank}, unit {handle.name}: DistributedDataParallel cannot average the gradient of its "
            f"flat parameter, which is {why}: use HYBRID_SHARD in place of DistributedDataParallel, or NO_SHARD "
            "without CPU offload"
        )
