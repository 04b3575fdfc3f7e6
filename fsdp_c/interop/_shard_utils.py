"""The names of torch.distributed.fsdp._shard_utils: tensors cut by rows over ranks. They know of no units."""

# ruff: noqa: F401

from fsdp_c.compat.upstream import (
    _all_gather_dtensor,
    _create_chunk_dtensor,
    _create_chunk_sharded_tensor,
)
