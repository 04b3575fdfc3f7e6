"""Helpers for tests of checkpoints: reading all values of one, and saves in processes that are killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_c import checkpoint
from fsdp_c.checkpoint.folder import LAYOUT, METADATA, read_footer, with_footer
from fsdp_c.checkpoint.storage import read_checkpoint, read_entries
from tests.parity.engine import same_bits
from tests.processes import ROOT

PAGE = ROOT / "docs" / "checkpoints.md"
StrPath = str | os.PathLike[str]


def code_of_page(heading: str) -> str:
    """Return the Python code block below a heading of docs/checkpoints.md."""
    _, below = PAGE.read_text().split(f"\n## {heading}\n")
    return below.partition("\n## ")[0].split("```python\n")[1].partition("```")[0]


def contents(path: Path) -> dict[str, Any]:
    """Return every entry of a checkpoint by key, unsharded."""
    found = read_checkpoint(path)
    return read_entries(found, found.entries)


def pickle_of(content: bytes) -> bytes:
    """Return a ``.metadata`` of fsdp_c without its last two lines."""
    last = content.splitlines(keepends=True)[-1]
    return content[: -len(last) - int(last.split()[2], 16)]


def with_right_checksums(path: Path, layout: bytes) -> None:
    """Replace the layout of a checkpoint and update its checksum, as a forger would."""
    footer, content = read_footer(path), (path / METADATA).read_bytes()
    assert footer is not None
    (path / footer.data / LAYOUT).write_bytes(layout)
    footer.files[LAYOUT] = len(layout), zlib.crc32(layout)
    (path / METADATA).write_bytes(b"".join(with_footer([pickle_of(content)], footer)))


def quick_disk() -> Iterator[None]:
    """Skip fsync: a fixture of tests without a power failure."""
    with mock.patch("os.fsync", lambda descriptor: None):
        yield


def listed(path: Path) -> dict[str, bytes]:
    """Return every file below ``path`` with its content."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def flipped(path: Path, position: int) -> None:
    """Change a bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def differences(one: Path, other: Path) -> list[str]:
    """Return the keys that differ in value between two checkpoints or are in one of them only."""
    ours, theirs = contents(one), contents(other)
    shared = ours.keys() & theirs.keys()
    return sorted(
        (ours.keys() ^ theirs.keys()) | {key for key in shared if not same_bits(ours[key], theirs[key])}
    )


class ExtraState(nn.Module):
    """A module with extra state."""

    own: Any = None

    def get_extra_state(self) -> Any:
        return self.own

    def set_extra_state(self, state: Any) -> None:
        self.own = state


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, version: int) -> None:
    """Fill every parameter and every tensor of the optimizer's state with ``version``."""
    for param in model.parameters():
        param.fill_(version)
        for value in optimizer.state[param].values():
            value.fill_(version)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30))


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with a buffer and a channels_last weight, and an optimizer that has state."""
    torch.manual_seed(seed)
    layers = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(nn.Sequential(*layers).parameters())
    loss = layers[1](layers[0](torch.randn(4, 7))).square().sum() + layers[2].weight.square().sum()
    loss.backward()
    optimizer.step()
    return nn.Sequential(*layers), optimizer


def model_of(version: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer whose parameters and state tensors are all ``version``."""
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():  # without a backward, which some processes cannot run after a fork
        param.grad = torch.zeros_like(param)
    optimizer.step()
    fill(model, optimizer, version)
    return model, optimizer


def loaded_version(path: StrPath, model: nn.Module | None = None) -> int:
    """Return the version of a checkpoint of ``model_of``, or of ``model``. Assert that it is of one piece."""
    model = model or plain()
    optimizer = torch.optim.AdamW(model.parameters())
    version: int = checkpoint.load(model, optimizer, path)["version"]
    params = [*model.state_dict().values()]
    of_optimizer = [value for state in optimizer.state.values() for value in state.values()]
    assert len(of_optimizer) == 3 * len(params)
    assert {each for tensor in (*params, *of_optimizer) for each in tensor.unique().tolist()} == {version}
    return version


def save(path: StrPath, version: int, background: bool = False) -> None:
    """Save one version. All saved values are overwritten while a background save runs."""
    model, optimizer = model_of(version)
    extra = {"version": version}
    handle = checkpoint.save(model, optimizer, path, extra=extra, background=background)
    fill(model, optimizer, -1)
    extra["version"] = -1
    handle.wait()


def torch_save(path: Path, version: int) -> None:
    """Save with torch's DCP what ``save`` saves."""
    model, optimizer = model_of(version)
    optim = checkpoint.optim_state(model, optimizer)
    state = {"model": model.state_dict(), "optim": optim, "extra": {"version": version}}
    dcp.save(state, checkpoint_id=path, no_dist=True)


_CALLS = set("open mkdir rename unlink rmdir ftruncate pwrite flush close flock scandir".split())


def killed_at(call: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a forked process that kills itself before its ``call``th file system call that changes,
    locks or lists files. Return True if that call was reached.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads warns; the threads are idle
        child = os.fork()
    if child == 0:
        left = call

        def count(frame: object, event: str, function: Any) -> None:
            nonlocal left
            if event == "c_call" and function.__name__ in _CALLS and "BytesIO" not in function.__qualname__:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            threading.setprofile(count)
            sys.setprofile(count)
            work()
            sys.setprofile(None)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL
