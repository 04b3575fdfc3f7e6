"""Shared libraries of C++ that tests run on, built into a folder as far as they are stale."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FLAGS = ["-fPIC", "-fvisibility=hidden", "-g1"]
STRICT = ["-Wall", "-Wextra", "-Werror"]
KERNEL_FLAGS = [  # of fsdp_c's .cu files, where their kernels are emulated
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    *STRICT,
    "-Wno-unknown-pragmas",
]


@dataclass(frozen=True)
class Unit:
    """One file to compile, and the torch that it is compiled for."""

    source: Path
    object: Path
    flags: tuple[str, ...]
    torch: Path

    @property
    def command(self) -> list[str]:
        return ["g++", *FLAGS, *self.flags, "-MMD", "-c", str(self.source), "-o", str(self.object)]

    @property
    def stamp(self) -> str:
        """What it was made by, beside its times: the command, and the torch whose headers it includes."""
        return json.dumps([self.command, (self.torch / "version.py").read_text()])

    def is_stale(self) -> bool:
        depfile, stamp = self.object.with_suffix(".d"), self.object.with_suffix(".json")
        if not depfile.exists() or not stamp.exists() or stamp.read_text() != self.stamp:
            return True
        return is_stale(self.object, inputs_of(depfile))

    def compile(self) -> None:
        call(*self.command)
        self.object.with_suffix(".json").write_text(self.stamp)


@dataclass(frozen=True)
class Library:
    """A shared library of units and of further objects, what it is linked with, and the names that it
    shows."""

    target: Path
    units: tuple[Unit, ...]
    linking: tuple[str, ...] = ()
    further: tuple[Path, ...] = ()
    names: Path | None = None

    def link(self) -> None:
        objects = [*(unit.object for unit in self.units), *self.further]
        if is_stale(self.target, [*objects, *filter(None, [self.names])]):
            made = self.target.with_name(f"{self.target.name}.new")
            # -Wl splits at commas
            shown = ["-Xlinker", f"--version-script={self.names}"] if self.names else []
            call("g++", "-shared", *map(str, objects), *self.linking, *shown, "-o", str(made))
            made.replace(self.target)  # processes that have the old one keep it


def inputs_of(depfile: Path) -> list[Path]:
    """The files that an object was made from, which the compiler wrote down for make, with its escapes."""
    names = re.split(r"(?<!\\)\s+", depfile.read_text().replace("\\\n", " ").partition(": ")[2].strip())
    return [Path(re.sub(r"\\([ #])", r"\1", name).replace("$$", "$")) for name in names]


def is_stale(target: Path, inputs: Sequence[Path]) -> bool:
    """Missing or older than any input, or an input has gone."""
    if not target.exists():
        return True
    built = target.stat().st_mtime_ns
    return any(not one.exists() or one.stat().st_mtime_ns > built for one in inputs)


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"a library that tests run on cannot be built: {' '.join(command)}\n{said}")


def soname(name: str) -> str:
    """By which those who look for a library of this name find it, once it is loaded."""
    return f"-Wl,-soname,{name}"


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """One process builds in the folder, which is made, at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(wanted: Sequence[Library], what: str) -> None:
    """Compile what is stale, the last library's units first, and link in turn."""
    stale = [unit for library in reversed(wanted) for unit in library.units if unit.is_stale()]
    if stale:
        print(f"building {what}: {len(stale)} files", flush=True)
    with ThreadPoolExecutor(int(os.environ.get("FSDP_C_JOBS", min(os.cpu_count() or 1, 8)))) as pool:
        list(pool.map(Unit.compile, stale))
    for library in wanted:
        library.link()
