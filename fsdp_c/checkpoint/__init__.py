"""Sharded checkpoints that survive a crash: saved without exchange of parameters, verified by load.

``save`` and ``load`` use torch.distributed.checkpoint's format; ``python -m fsdp_c.checkpoint`` verifies a
checkpoint and exports its model to safetensors, without ranks.
"""

from fsdp_c.checkpoint.background import BackgroundSave
from fsdp_c.checkpoint.folder import CheckpointError, latest
from fsdp_c.checkpoint.loading import load
from fsdp_c.checkpoint.model_state import model_state
from fsdp_c.checkpoint.optim_state import optim_state
from fsdp_c.checkpoint.saving import save

__all__ = ["BackgroundSave", "CheckpointError", "latest", "load", "model_state", "optim_state", "save"]
