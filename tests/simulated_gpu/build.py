"""Incremental build of the simulated device into build/simulated_gpu. A full build takes one or two minutes.

libcuda.so.1 is the device, libtorch_cuda.so is torch's backend for it, and _cuda.so contains fsdp_c's
kernels.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

from tests.libraries import KERNEL_FLAGS, STRICT, Library, Unit, build, one_at_a_time, soname

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEVICE = HERE / "device"
TIMELINE = ROOT / "benchmarks" / "timeline" / "device"  # the model of time
FOLDER = ROOT / "build" / "simulated_gpu"
DEVICE_SOURCES = ("streams", "accesses", "memory", "driver", "graph", "timeline")
TORCH_SOURCES = (
    "operators",
    "nccl",
    "torch_device",
    "python",
    "held_operator",
    "operator_call",
    "tensors",
    "operator_costs",
    "cpu_tensors",
)  # longest compilation first

DEVICE_FLAGS = ["-std=c++20", "-O1", *STRICT]
# NDEBUG as in torch's build: assertions in its headers would change the layout of structs.
TORCH_FLAGS = ["-std=c++20", "-O1", "-DNDEBUG", *STRICT]
TORCH_FLAGS += [
    "-DTORCH_EXTENSION_NAME=_C",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
]


def torch_folder() -> Path:
    """Return the folder of the installed torch without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("the simulated GPU is built for a torch, and none is installed")
    return Path(found.submodule_search_locations[0])


def units(names: tuple[str, ...], flags: list[str]) -> tuple[Unit, ...]:
    including = [*flags, f"-I{DEVICE}", f"-I{TIMELINE}"]
    folders = {name: DEVICE if (DEVICE / f"{name}.cpp").exists() else TIMELINE for name in names}
    return tuple(unit(folder / f"{name}.cpp", f"{name}.o", including) for name, folder in folders.items())


def unit(source: Path, name: str, flags: list[str]) -> Unit:
    return Unit(source, FOLDER / name, tuple(flags), torch_folder())


OF_DEVICE = ("-L", str(FOLDER), "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN")


def device_library() -> Library:
    return Library(FOLDER / "libcuda.so.1", units(DEVICE_SOURCES, DEVICE_FLAGS), (soname("libcuda.so.1"),))


def torch_library() -> Library:
    torch = torch_folder()
    includes = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]
    flags = [*TORCH_FLAGS, *(word for path in includes for word in ("-isystem", str(path)))]
    of_torch = (
        f"-L{torch / 'lib'}",
        "-Xlinker",  # -Wl splits its arguments at commas
        f"-rpath={torch / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
    )
    name = "libtorch_cuda.so"
    return Library(FOLDER / name, units(TORCH_SOURCES, flags), (soname(name), *of_torch, *OF_DEVICE))


def kernel_library() -> Library:
    """Return the library of fsdp_c's .cu files. Their table is renamed, and wrapped by the table that reports
    each kernel's memory accesses.
    """
    emulation = ROOT / "tests" / "native" / "cuda_emulation.h"
    flags = [
        *KERNEL_FLAGS,
        "-DCUDA_THREADS=32",
        f"-I{ROOT / 'csrc'}",
        f"-I{DEVICE}",
        f"-I{TIMELINE}",
        "-include",
        str(emulation),
        "-x",
        "c++",
    ]
    renamed = [*flags, "-Dfsdp_c_cuda_kernels=emulated_kernels"]
    kernels = [unit(DEVICE / "fsdp_c_kernels.cpp", "fsdp_c_kernels.o", flags)]
    for path in sorted((ROOT / "csrc" / "kernels").glob("*.cu")):
        kernels.append(unit(path, f"{path.stem}.cu.o", renamed))
    return Library(FOLDER / "_cuda.so", tuple(kernels), OF_DEVICE)


def built_folder() -> Path:
    """Build stale libraries and return their folder. One process builds at a time."""
    with one_at_a_time(FOLDER):
        build([device_library(), torch_library(), kernel_library()], "the simulated GPU")
    return FOLDER
