"""Builds the simulated device into build/simulated_gpu, as far as it is stale: a minute or two from nothing.

libcuda.so.1 is the device, libtorch_cuda.so torch's side of it, _cuda.so fsdp_c's kernels for it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEVICE = HERE / "device"
FOLDER = ROOT / "build" / "simulated_gpu"
DEVICE_SOURCES = ("streams", "accesses", "memory", "driver", "later", "graph", "timeline")
TORCH_SOURCES = (
    "operators",
    "nccl",
    "torch_device",
    "python",
    "held_operator",
    "recurrent",
    "tensors",
)  # the longest first

FLAGS = ["-fPIC", "-fvisibility=hidden", "-g1"]
STRICT = ["-Wall", "-Wextra", "-Werror"]
DEVICE_FLAGS = ["-std=c++20", "-O1", *STRICT]
# NDEBUG as torch was built: what its headers assert would be another layout.
TORCH_FLAGS = ["-std=c++20", "-O1", "-DNDEBUG", *STRICT]
TORCH_FLAGS += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
KERNEL_FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", *STRICT, "-Wno-unknown-pragmas"]
KERNEL_FLAGS += ["-DCUDA_THREADS=32"]


@dataclass(frozen=True)
class Unit:
    """One file to compile."""

    source: Path
    object: Path
    flags: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        return ["g++", *FLAGS, *self.flags, "-MMD", "-c", str(self.source), "-o", str(self.object)]

    @property
    def stamp(self) -> str:
        """What it was made by, beside its times: the command, and the torch whose headers it includes."""
        return json.dumps([self.command, (torch_folder() / "version.py").read_text()])

    def is_stale(self) -> bool:
        depfile, stamp = self.object.with_suffix(".d"), self.object.with_suffix(".json")
        if not depfile.exists() or not stamp.exists() or stamp.read_text() != self.stamp:
            return True
        inputs = depfile.read_text().replace("\\\n", " ").partition(":")[2].split()
        return is_stale(self.object, [Path(name) for name in inputs])

    def compile(self) -> None:
        call(*self.command)
        self.object.with_suffix(".json").write_text(self.stamp)


@dataclass(frozen=True)
class Library:
    """A shared library of units, and what it is linked with."""

    name: str
    units: tuple[Unit, ...]
    linking: tuple[str, ...] = ()

    def link(self) -> None:
        target = FOLDER / self.name
        objects = [unit.object for unit in self.units]
        if is_stale(target, objects):
            made = target.with_name(f"{self.name}.new")
            call("g++", "-shared", *map(str, objects), *self.linking, "-o", str(made))
            made.replace(target)  # processes that have the old one keep it


def is_stale(target: Path, inputs: list[Path]) -> bool:
    """Missing or older than any input, or an input has gone."""
    if not target.exists():
        return True
    built = target.stat().st_mtime_ns
    return any(not one.exists() or one.stat().st_mtime_ns > built for one in inputs)


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"the simulated GPU cannot be built: {' '.join(command)}\n{said}")


def torch_folder() -> Path:
    """Of the installed torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("the simulated GPU is built for a torch, and none is installed")
    return Path(found.submodule_search_locations[0])


def units(names: tuple[str, ...], flags: list[str]) -> tuple[Unit, ...]:
    return tuple(Unit(DEVICE / f"{name}.cpp", FOLDER / f"{name}.o", tuple(flags)) for name in names)


def soname(name: str) -> str:
    """By which those who look for a library of this name find it, once it is loaded."""
    return f"-Wl,-soname,{name}"


OF_DEVICE = ("-L", str(FOLDER), "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN")


def device_library() -> Library:
    return Library("libcuda.so.1", units(DEVICE_SOURCES, DEVICE_FLAGS), (soname("libcuda.so.1"),))


def torch_library() -> Library:
    torch = torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    flags = [*TORCH_FLAGS, *(word for path in includes for word in ("-isystem", str(path)))]
    of_torch = (
        f"-L{torch / 'lib'}",
        f"-Wl,-rpath,{torch / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
    )
    name = "libtorch_cuda.so"
    return Library(name, units(TORCH_SOURCES, flags), (soname(name), *of_torch, *OF_DEVICE))


def kernel_library() -> Library:
    """fsdp_c's .cu files, whose table is known inside by another name, under the table that says what they touch."""
    emulation = ROOT / "tests" / "native" / "cuda_emulation.h"
    flags = (*KERNEL_FLAGS, f"-I{ROOT / 'csrc'}", f"-I{DEVICE}", "-include", str(emulation), "-x", "c++")
    renamed = (*flags, "-Dfsdp_c_cuda_kernels=emulated_kernels")
    kernels = [Unit(DEVICE / "fsdp_c_kernels.cpp", FOLDER / "fsdp_c_kernels.o", flags)]
    for path in sorted((ROOT / "csrc" / "kernels").glob("*.cu")):
        kernels.append(Unit(path, FOLDER / f"{path.stem}.cu.o", renamed))
    return Library("_cuda.so", tuple(kernels), OF_DEVICE)


def built_folder() -> Path:
    """The folder of the libraries, which are as new as their sources. One process builds at a time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = [device_library(), torch_library(), kernel_library()]
        stale = [unit for library in reversed(wanted) for unit in library.units if unit.is_stale()]
        if stale:
            print(f"building the simulated GPU: {len(stale)} files", flush=True)
        with ThreadPoolExecutor(int(os.environ.get("FSDP_C_JOBS", min(os.cpu_count() or 1, 8)))) as pool:
            list(pool.map(Unit.compile, stale))
        for library in wanted:
            library.link()
    return FOLDER
