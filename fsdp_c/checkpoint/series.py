"""The checkpoints of one run, in folders side by side that end in a number: ``runs/lm/step-000200``."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import NamedTuple

from fsdp_c.checkpoint.folder import (
    CheckpointError,
    StrPath,
    check_path,
    has_data,
    is_whole,
    remove_checkpoint,
)


class _Name(NamedTuple):
    before: str
    number: int
    after: str

    @classmethod
    def of(cls, name: str) -> _Name | None:
        found = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", name)
        return cls(found[1], int(found[2]), found[3]) if found and not name.startswith(".") else None


def latest(folder: StrPath) -> Path | None:
    """The whole checkpoint in ``folder`` whose name has the largest last number: step-200 of step-100 and
    step-200.

    None where there is none. A checkpoint is whole if all files that it names are there; ``load`` finds
    damage in them. Not collective: call it before a save may run, so that all ranks find the same.
    """
    check_path(folder)
    try:
        found = [(name.number, path) for path in Path(folder).iterdir() if (name := _Name.of(path.name))]
    except FileNotFoundError:
        return None
    return next((path for _, path in sorted(found, reverse=True) if is_whole(path)), None)


def check_keep(path: Path, keep: int | None) -> None:
    """Raise ValueError where ``keep`` does not say which checkpoints beside ``path`` are to stay."""
    if keep is None:
        return
    if keep < 1:
        raise ValueError(f"keep={keep}: the checkpoint that is saved would be removed")
    if _Name.of(path.name) is None:
        raise ValueError(
            f"keep={keep}: {path} has no number in its name, so none is older: call it step-100, or such"
        )


def remove_older(path: Path, keep: int) -> None:
    """Of the checkpoints beside ``path`` whose names differ in the last number alone, leave it and those with
    the largest numbers, ``keep`` together. A warning where one cannot be removed."""
    own = _Name.of(path.name)
    assert own is not None
    others = []
    for each in path.parent.iterdir():
        name = _Name.of(each.name)
        if name and (name.before, name.after) == (own.before, own.after) and each != path and each.is_dir():
            others.append((name.number, each))
    kept = 1
    for number, each in sorted(others, reverse=True):
        try:
            if is_whole(each) and kept < keep:
                kept += 1
            elif has_data(each) and (is_whole(each) or number < own.number):  # or another job is saving it
                remove_checkpoint(each)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"{each}: not removed, as keep={keep} asks for: {error}", stacklevel=2)
