"""The output folder of a run and the checkpoints in it.

    OUT/run.json, loss.png, sample.txt
    OUT/step-000200/    a folder of fsdp_c.checkpoint: the shards of all ranks, with checksums

A checkpoint is complete or absent. Checkpoints load on any number of ranks, with any strategy, and also into torch's
FSDP.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lm_data import InputError
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp_c
from fsdp_c import checkpoint

RUN_FILE = "run.json"
OWN_FILES = (RUN_FILE, "loss.png", "sample.txt")


def is_checkpoint(folder: Path) -> bool:
    """Return True if ``folder`` contains .metadata, the last file of a save."""
    return (folder / ".metadata").is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if is_checkpoint(path))


def find_checkpoints(resume: str, out: Path) -> list[Path]:
    """Return the checkpoints to try for ``--resume``, in order: a single checkpoint, the newest of a run, or
    for "auto" all in ``out``, newest first.
    """
    if resume == "auto":
        return checkpoints_in(out)[::-1]
    folder = Path(resume)
    found = [folder] if is_checkpoint(folder) else checkpoints_in(folder)[-1:]
    if not found:
        raise InputError(f"--resume {resume}: no checkpoint there")
    return found


def open_run_folder(out: Path, *, resumed: Path | None, resume: str | None, overwrite: bool) -> None:
    """Create ``out``, or reuse an earlier run's folder to replace the run or to continue from its newest
    checkpoint. Called on one rank.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file")
    if out.exists() and any(out.iterdir()):
        is_run = (out / RUN_FILE).is_file()
        newest = [path.resolve() for path in checkpoints_in(out)[-1:]]
        continues = is_run and (
            resume == "auto" or (resume and newest == ([resumed.resolve()] if resumed else []))
        )
        if overwrite and is_run and not resume:
            remove_run(out)
        elif not continues:
            advice = "use --overwrite, --resume auto or another --out" if is_run else "choose another --out"
            raise InputError(
                f"--out {out} exists and is {'a run' if is_run else 'not a run of this script'}: {advice}"
            )
    out.mkdir(parents=True, exist_ok=True)


def remove_run(out: Path) -> None:
    """Remove the files that this script wrote, and no others."""
    for path in out.glob("step-*"):
        shutil.rmtree(path)
    for name in OWN_FILES:
        (out / name).unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with a temporary file, flush the file to disk and rename it to ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


def save_checkpoint(
    path: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    keep: int,
) -> checkpoint.BackgroundSave | None:
    """Write ``OUT/step-...``, then remove all but the newest ``keep`` checkpoints. Collective. With fsdp_c
    the save runs in the background and its handle is returned.
    """
    if isinstance(model, fsdp_c.FullyShardedDataParallel):
        return checkpoint.save(model, optimizer, path, extra=extra, keep=keep, background=True)
    save_of_torch(model, optimizer, path, extra)
    if dist.get_rank() == 0:
        for old in checkpoints_in(path.parent)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return None


def load_checkpoint(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load model and optimizer and return ``extra``. Collective. Raises InputError on all ranks if the
    checkpoint is damaged or of another model.
    """
    try:
        if isinstance(model, fsdp_c.FullyShardedDataParallel):
            return checkpoint.load(model, optimizer, path)
        return load_of_torch(model, optimizer, path)
    except checkpoint.CheckpointError as error:
        raise InputError(str(error)) from error


# Checkpoints through torch.distributed.checkpoint, for --impl torch and --against torch.


def save_of_torch(model: Any, optimizer: torch.optim.Optimizer, path: Path, extra: dict[str, Any]) -> None:
    """Save under a temporary name and rename at the end: torch.distributed.checkpoint writes in place."""
    states = get_state_dict(model, optimizer)
    temporary = path.with_name(f".{path.name}")
    dcp.save({"model": states[0], "optim": states[1], "extra": extra}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    dist.barrier()


def load_of_torch(model: Any, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
    """Load a checkpoint into torch's FSDP."""
    extra = checkpoint.load(torch.nn.Module(), None, path, strict=False)
    states = get_state_dict(model, optimizer)
    dcp.load({"model": states[0], "optim": states[1]}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    return extra
