"""The output folder of a run and the checkpoints in it.

    OUT/run.json, loss.png, sample.txt
    OUT/step-000200/model.pt             the full model, readable without FSDP
                    optimizer-0-of-2.pt  the optimizer's state of rank 0's shards
                    checkpoint.json      what the two belong to

A checkpoint is complete or not there: it is written under a temporary name, flushed to disk, then renamed.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm_data import InputError

RUN_FILE = "run.json"
OWN_FILES = (RUN_FILE, "loss.png", "sample.txt")


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "checkpoint.json").is_file())


def find_checkpoint(resume: str, out: Path) -> Path | None:
    """What ``--resume`` means: this checkpoint, the newest of this run, or with "auto" the newest in ``out`` if any."""
    folder = out if resume == "auto" else Path(resume)
    if (folder / "checkpoint.json").is_file():
        return folder
    found = checkpoints_in(folder)
    if not found and resume != "auto":
        raise InputError(f"--resume {resume}: no checkpoint there")
    return found[-1] if found else None


def open_run_folder(out: Path, *, resumed: Path | None, resume: bool, overwrite: bool) -> None:
    """Make ``out``, or take it over where that was asked for: an earlier run to replace, or to continue from its newest
    checkpoint. Called by one rank."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file")
    if out.exists() and any(out.iterdir()):
        is_run = (out / RUN_FILE).is_file()
        newest = [path.resolve() for path in checkpoints_in(out)[-1:]]
        continues = resume and is_run and newest == ([resumed.resolve()] if resumed else [])
        if overwrite and is_run and not resume:
            remove_run(out)
        elif not continues:
            advice = "use --overwrite, --resume auto or another --out" if is_run else "choose another --out"
            raise InputError(f"--out {out} exists and is {'a run' if is_run else 'not a run of this script'}: {advice}")
    out.mkdir(parents=True, exist_ok=True)


def remove_run(out: Path) -> None:
    """Remove what this script wrote, and nothing else."""
    for path in [*out.glob("step-*"), *out.glob(".step-*.tmp")]:
        shutil.rmtree(path)
    for name in OWN_FILES:
        (out / name).unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file, flush it to disk and give it its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    flush(temporary)
    temporary.replace(path)


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(
    out: Path, description: dict[str, Any], model: dict[str, Any], optimizer: dict[str, Any], keep: int
) -> None:
    """Write ``OUT/step-...``, then drop all but the newest ``keep``. Collective; only rank 0 looks at ``model``."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    final = out / f"step-{description['step']:06d}"
    temporary = out / f".{final.name}.tmp"
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    dist.barrier()
    torch.save(optimizer, temporary / optimizer_file(rank, world_size))
    flush(temporary / optimizer_file(rank, world_size))
    if rank == 0:
        write_atomically(temporary / "model.pt", lambda path: torch.save(model, path))
        write_atomically(temporary / "checkpoint.json", lambda path: path.write_text(json.dumps(description)))
    dist.barrier()
    if rank == 0:
        publish(temporary, final)
        for old in checkpoints_in(out)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name; one of the same step, left by an earlier run of this folder, goes."""
    flush(temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    flush(final.parent)


def optimizer_file(rank: int, world_size: int) -> str:
    return f"optimizer-{rank}-of-{world_size}.pt"


def read_description(checkpoint: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds. InputError where it was made by something other than ``expected``."""
    try:
        description = json.loads((checkpoint / "checkpoint.json").read_text())
        found = {key: description[key] for key in expected}
        description["step"], description["losses"], description["evaluations"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{checkpoint}: damaged checkpoint.json ({error!r})") from error
    for key, value in expected.items():
        if found[key] != value:
            raise InputError(f"{checkpoint} is of another {key.replace('_', ' ')}: {found[key]} there, {value} here")
    return description


def load_part(checkpoint: Path, name: str) -> dict[str, Any]:
    """One file of a checkpoint, tensors on the CPU."""
    try:
        return torch.load(checkpoint / name, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"{checkpoint / name}: cannot be read ({error})") from error
