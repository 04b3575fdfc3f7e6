"""Mutated checkpoints: each is refused with a CheckpointError, or read; none crashes, hangs, or takes memory.

    python -m tests.fuzz.checkpoint --seconds 60
    python -m tests.fuzz.checkpoint --count 20000
    python -m tests.fuzz.checkpoint --only headers --count 100000

A trial depends only on the seed and its number: ``--first N --count 1`` repeats trial N. In ``pieces`` the
files keep the checksums of their original content, so that only saved values may be loaded. Trials run in
their own process with limited address space, which is killed after SECONDS_OF_A_TRIAL in one trial.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import io
import json
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError, cli
from fsdp_c.checkpoint.contents import TensorEntry
from fsdp_c.checkpoint.folder import LAYOUT, METADATA
from fsdp_c.checkpoint.storage import read_checkpoint
from tests.checkpoints import contents, trained, with_right_checksums

SECONDS_OF_A_TRIAL = 20
MEMORY_OF_ALL = 2**29  # resident memory of all trials of a kind
ADDRESSES_OF_ALL = 2**31
NUMBERS = [-1, 0, 1, 2, 5, 24, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, True]
VALUES = [*NUMBERS, None, "", "x", "..", "/etc/passwd", b"", 0.5, (), (0,), (2, 3), [], [2**40, 2**40], {}]
VALUES.append(torch.int8)


# ----------------------------------------------------------------- mutations


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return ``content`` with a few bytes or a slice changed."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        length = rng.choice([1, 1, 2, 4, 8, rng.randrange(64)])
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = rng.choice(NUMBERS) % 2 ** (8 * max(length, 1))
            data[at : at + length] = number.to_bytes(max(length, 1), rng.choice(["little", "big"]))
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = rng.randbytes(length)
        elif kind == 4:
            source = rng.randrange(len(data) + 1)
            data[at : at + length] = data[source : source + length]
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)


def places(value: Any) -> list[tuple[Callable[[Any], None], Any]]:
    """Return (setter, value) of each value inside of dicts, their keys, lists and dataclasses."""
    found: list[tuple[Callable[[Any], None], Any]] = []
    if isinstance(value, dict):
        found = [(functools.partial(value.__setitem__, key), old) for key, old in value.items()]
    elif isinstance(value, list):
        found = [(functools.partial(value.__setitem__, at), old) for at, old in enumerate(value)]
    elif dataclasses.is_dataclass(value) and type(value) is not TensorProperties:  # which checks its own
        names = vars(value)
        found = [(functools.partial(object.__setattr__, value, name), names[name]) for name in names]
    keys = value if isinstance(value, dict) else ()
    return found + [place for one in (*keys, *(old for _, old in found)) for place in places(one)]


def change(tree: Any, values: list[Any], rng: random.Random) -> None:
    """Replace some values inside ``tree`` by odd ones or by other values of the tree."""
    inside = places(tree)
    for _ in range(rng.choice([1, 1, 2, 3])):
        put, old = rng.choice(inside)
        value = rng.choice([rng.choice(values), rng.choice(inside)[1]])
        if isinstance(old, (tuple, list)) and old and rng.random() < 0.6:
            odd = list(old)
            odd[rng.randrange(len(odd))] = rng.choice(values)
            value = type(old)(odd) if type(old) in (tuple, list) else tuple(odd)
        with contextlib.suppress(TypeError):  # a dict with a key that holds a list
            put(copy.deepcopy(value))  # the value may contain its place


# ----------------------------------------------------------------- subjects


class Subject:
    """A folder with an intact checkpoint, of which each trial changes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.make()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.sound = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        self.layout = next((name for name in self.sound if name.endswith(LAYOUT)), "")

    def make(self) -> None:
        checkpoint.save(*trained(), self.folder, extra={"list": [1, torch.ones(2)]})

    def change(self, rng: random.Random) -> str:
        """Change a file and return its name."""
        name = rng.choice(sorted(self.sound))
        (self.folder / name).write_bytes(mutated(self.sound[name], rng))
        return name

    def restore(self) -> None:
        for name, content in self.sound.items():
            (self.folder / name).write_bytes(content)

    def read(self) -> None:
        contents(self.folder)
        if verify(self.folder) == 2:
            raise CheckpointError("refused by verify")


class Pieces(Subject):
    """Changes any of fsdp_c's files and keeps the checksums: no other values are loaded, and verify finds it."""

    def make(self) -> None:
        super().make()
        self.expected = self.values()

    def values(self) -> list[Any]:
        model, optimizer = trained()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(-7)
        extra = checkpoint.load(model, optimizer, self.folder)
        state = optimizer.state_dict()["state"]
        return [
            *model.state_dict().values(),
            *(value for own in state.values() for value in own.values()),
            extra["list"][1],
        ]

    def read(self) -> None:
        found = {name for name, content in self.sound.items() if (self.folder / name).read_bytes() != content}
        assert bool(verify(self.folder)) == bool(found), "verify"
        values = self.values()
        assert all(name.endswith(".distcp") for name in found), "read"
        assert all(torch.equal(one, other) for one, other in zip(values, self.expected, strict=True)), "wrong"


class Layouts(Subject):
    """Changes the layout and updates its checksums, so that a load reads it, together with the data."""

    def change(self, rng: random.Random) -> str:
        content = self.sound[self.layout]
        if rng.random() < 0.3:
            content = mutated(content, rng)
        else:
            text = int.from_bytes(content[16:24], "little")
            header = json.loads(content[32 : 32 + text])
            rest = content[32 + text :]
            if rng.random() < 0.6:
                change(
                    header, [value for value in VALUES if not isinstance(value, (bytes, torch.dtype))], rng
                )
            else:
                rest = mutated(rest, rng)
            packed = json.dumps(header).encode()
            content = content[:16] + struct.pack("<QI4x", len(packed), zlib.crc32(packed)) + packed + rest
        with_right_checksums(self.folder, layout=content)
        return self.layout

    def read(self) -> None:
        try:
            checkpoint.load(*trained(), self.folder)
        except ValueError as error:  # state of a different optimizer
            raise CheckpointError(str(error)) from error
        found = read_checkpoint(self.folder)
        assert all(len([*entry.chunks]) for entry in found.entries.values() if isinstance(entry, TensorEntry))


class Headers(Subject):
    """Changes metadata or data of a checkpoint written by torch, which has no checksums."""

    def make(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                {"model": trained()[0].state_dict(), "note": [1, "x"]},
                checkpoint_id=self.folder,
                no_dist=True,
            )

    def change(self, rng: random.Random) -> str:
        if rng.random() < 0.4:
            metadata = pickle.loads(self.sound[METADATA])
            change(metadata, VALUES, rng)
            (self.folder / METADATA).write_bytes(pickle.dumps(metadata))
            return METADATA
        return Subject.change(self, rng)


def verify(path: Path) -> int:
    """Run the verify command and return its exit status. Asserts that a refusal is one line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        status = cli.main(["verify", str(path)])
    assert status in (0, 1, 2), status
    assert status != 2 or said.getvalue().count("\n") == 1, "a refusal is one line"
    return status


SUBJECTS = {"pieces": Pieces, "layouts": Layouts, "headers": Headers}
REFUSALS = (CheckpointError, FileNotFoundError, NotADirectoryError)


def trial(subject: Subject, seed: int, number: int) -> str:
    """Run one trial. Return "read" or "refused"; any other exception is a failure."""
    name = subject.change(random.Random(f"{seed} {number}"))
    try:
        subject.read()
        return "read"
    except REFUSALS as error:
        assert str(error), f"a refusal of {name} without words"
        return "refused"
    finally:
        subject.restore()


def run(
    subject: Subject, seed: int, numbers: range, deadline: float, started: Callable[[int], None]
) -> Counter[str]:
    """Run trials and return the number of each outcome. Raises the first failure's exception."""
    outcomes = Counter[str]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        started(number)
        signal.alarm(SECONDS_OF_A_TRIAL)
        outcomes[trial(subject, seed, number)] += 1
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak > MEMORY_OF_ALL // 1024:
            raise MemoryError(f"more than {MEMORY_OF_ALL} bytes were taken")
        if time.monotonic() > deadline:
            break
    return outcomes


def run_limited(name: str, seed: int, first: int, count: int, seconds: float = 1e9) -> Counter[str]:
    """Call ``run`` in a process with limits. Raises RuntimeError with the number of the trial that failed."""
    at = mmap.mmap(-1, 8)
    reading, writing = os.pipe()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            torch.set_num_threads(1)
            addresses = (
                int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + ADDRESSES_OF_ALL
            )
            resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

            def started(number: int) -> None:
                at[:] = number.to_bytes(8, "little")

            subject = SUBJECTS[name](folder / "checkpoint")
            numbers = range(first, first + count)
            outcomes = run(subject, seed, numbers, time.monotonic() + seconds, started)
            os.write(writing, json.dumps(outcomes).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.rmtree(folder)
    if status:
        why = {0: "", 1: "see above", -signal.SIGALRM: f"took more than {SECONDS_OF_A_TRIAL} s"}.get(
            status, f"ended {status}"
        )
        raise RuntimeError(
            f"{name}: --seed {seed} --first {int.from_bytes(at[:], 'little')} --count 1: {why}"
        )
    return Counter(json.loads(found))


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.fuzz.checkpoint", description=__doc__)
    parser.add_argument("--only", choices=SUBJECTS, help="kind of trials (default: all kinds, in turn)")
    parser.add_argument("--count", type=int, default=20_000, help="number of trials over all kinds")
    parser.add_argument("--seconds", type=float, help="run trials for this time instead of --count")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial of each kind")
    parser.add_argument("--seed", type=int, help="default: 0, or with --seconds a fresh one")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [args.only] if args.only else list(SUBJECTS)
    start = time.monotonic()
    for name in names:
        if args.seconds:
            seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
            outcomes = run_limited(name, seed, 0, sys.maxsize, args.seconds / len(names))
        else:
            outcomes = run_limited(name, args.seed or 0, args.first, -(-args.count // len(names)))
        print(f"{name}: {json.dumps(outcomes)}, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
