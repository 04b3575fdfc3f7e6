"""Incremental builds of the shared C++ libraries on which tests run."""

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
KERNEL_FLAGS = [  # flags for fsdp_c's .cu files where their kernels are emulated
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    *STRICT,
    "-Wno-unknown-pragmas",
]


@dataclass(frozen=True)
class Unit:
    """A source file to compile, and the torch it is compiled for."""

    source: Path
    object: Path
    flags: tuple[str, ...]
    torch: Path

    @property
    def command(self) -> list[str]:
        return ["g++", *FLAGS, *self.flags, "-MMD", "-c", str(self.source), "-o", str(self.object)]

    @property
    def stamp(self) -> str:
        """Return the build key: the command, and the version of the torch whose headers are included."""
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
    """A shared library: compiled units, further objects, linked libraries and exported names."""

    target: Path
    units: tuple[Unit, ...]
    linking: tuple[str, ...] = ()
    further: tuple[Path, ...] = ()
    names: Path | None = None

    def link(self) -> None:
        objects = [*(unit.object for unit in self.units), *self.further]
        if is_stale(self.target, [*objects, *filter(None, [self.names])]):
            made = self.target.with_name(f"{self.target.name}.new")
            # -Wl splits its arguments at commas
            shown = ["-Xlinker", f"--version-script={self.names}"] if self.names else []
            call("g++", "-shared", *map(str, objects), *self.linking, *shown, "-o", str(made))
            made.replace(self.target)  # a rename: processes with the old library loaded keep it


def inputs_of(depfile: Path) -> list[Path]:
    """Return the dependencies of an object from the depfile that the compiler wrote, with make's escapes
    resolved.
    """
    names = re.split(r"(?<!\\)\s+", depfile.read_text().replace("\\\n", " ").partition(": ")[2].strip())
    return [Path(re.sub(r"\\([ #])", r"\1", name).replace("$$", "$")) for name in names]


def is_stale(target: Path, inputs: Sequence[Path]) -> bool:
    """Return True if ``target`` is missing or older than an input, or an input is missing."""
    if not target.exists():
        return True
    built = target.stat().st_mtime_ns
    return any(not one.exists() or one.stat().st_mtime_ns > built for one in inputs)


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        output = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"a library that tests run on cannot be built: {' '.join(command)}\n{output}")


def soname(name: str) -> str:
    """Return the linker flag for a soname. Libraries that need this name get the loaded library."""
    return f"-Wl,-soname,{name}"


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Create the folder and lock it, so that one process builds at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(wanted: Sequence[Library], what: str) -> None:
    """Compile stale units, those of the last library first, then link the libraries in order."""
    stale = [unit for library in reversed(wanted) for unit in library.units if unit.is_stale()]
    if stale:
        print(f"building {what}: {len(stale)} files", flush=True)
    with ThreadPoolExecutor(int(os.environ.get("FSDP_C_JOBS", min(os.cpu_count() or 1, 8)))) as pool:
        list(pool.map(Unit.compile, stale))
    for library in wanted:
        library.link()
