"""An old checkpoint of torch's FSDP1, one file of full state dicts, becomes a folder of shards with
checksums.

torchrun --nproc-per-node 2 examples/convert_fsdp1_checkpoint.py old.pt runs/new

What wrote old.pt, with torch's FSDP1 on any number of ranks:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        saved = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer), "extra":
        {"step": step}}
    if rank == 0:
        torch.save(saved, "old.pt")
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import StateDictType, checkpoint
from fsdp_c.wrap import ModuleWrapPolicy


def wrapped_model():  # yours, wrapped as you like: the old one may have been wrapped in another way
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(32, 10))
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def main(old, new):
    dist.init_process_group("gloo")
    model = wrapped_model()
    optimizer = torch.optim.AdamW(model.parameters())
    # no rank reads more than its shards
    saved = torch.load(old, map_location="cpu", mmap=True, weights_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optim"]))
    checkpoint.save(model, optimizer, new, extra=saved["extra"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
