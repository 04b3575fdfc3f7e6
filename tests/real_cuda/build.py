"""Builds the environment with a CUDA build of torch, and the libraries below torch, in build/real_cuda.

libcuda.so.1, libcudart.so.13, libnvidia-ml.so.1 and libnccl.so.2 replace NVIDIA's libraries of these names.
liboperators.so registers operators with torch that compute on the host's memory. _cuda.so contains fsdp_c's
kernels compiled by nvcc, and launches them in libfsdp_kernels.so, which emulates them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.libraries import KERNEL_FLAGS, STRICT, Library, Unit, build, is_stale, one_at_a_time, soname

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEVICE = HERE / "device"
# its implementation of operators is compiled here too
SIMULATED = ROOT / "tests" / "simulated_gpu" / "device"
KERNELS = ROOT / "csrc" / "kernels"
CLIENTS = "requirements/clients.txt"
EMULATION = ROOT / "tests" / "native" / "cuda_emulation.h"
FOLDER = Path(os.environ.get("FAKE_CUDA_FOLDER", ROOT / "build" / "real_cuda"))
RUNTIME, DRIVER, MANAGEMENT, NCCL = "libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2"

REQUIREMENTS = ("requirements/dev.txt",)
DEVICE_FLAGS = ["-std=c++20", "-O2", *STRICT]
TORCH_FLAGS = ["-std=c++20", "-O1", "-DNDEBUG", *STRICT]


def install(python: Path, torch: str, names: Iterable[str] = REQUIREMENTS) -> None:
    """Install the requirements in these files, with this torch. "===" excludes builds with a local label such
    as 2.13.0+cpu.
    """
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines()]
    others = [line for line in lines if line and not line.startswith(("#", "-r", "torch=="))]
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, f"torch==={torch}", *others], check=True)


class Build:
    """The build for one version of torch, such as "2.13.0"."""

    def __init__(self, version: str) -> None:
        self.version, self.home = version, FOLDER / version
        self.folder = FOLDER / f"{version}.libraries"

    @property
    def python(self) -> Path:
        return self.home / "bin/python"

    @property
    def packages(self) -> Path:
        return next(self.home.glob("lib/python*/site-packages"))

    @property
    def torch(self) -> Path:
        return self.packages / "torch"

    def make(self) -> None:
        """Build stale parts. The environment takes some minutes and 5 GB, the libraries a few minutes."""
        with one_at_a_time(FOLDER):
            self.make_environment()
            self.folder.mkdir(exist_ok=True)
            build([*self.device_libraries(), self.operators()], f"what stands under torch {self.version}")
            self.make_kernels()

    def make_environment(self) -> None:
        """Create the environment: its Python, torch, the other requirements, and this checkout on its path. A
        file ``made`` marks it as complete.
        """
        if is_stale(self.home / "made", [ROOT / name for name in REQUIREMENTS]):
            print(f"making an environment with torch {self.version}: 5 GB", flush=True)
            if not self.python.exists():
                subprocess.run([sys.executable, "-m", "venv", str(self.home)], check=True)
            install(self.python, self.version)
            (self.packages / "fsdp_c_checkout.pth").write_text(f"{ROOT}\n")
            (self.home / "made").touch()
        if not re.search(r"^cuda\b[^=]*=\s*'13\.", (self.torch / "version.py").read_text(), re.MULTILINE):
            raise SystemExit(f"torch {self.version} of {self.home} is no build for CUDA 13")

    def make_clients(self) -> Path:
        """Return the Python of a second environment with the libraries of tests/clients, on top of torch's,
        which stays unchanged.
        """
        home = FOLDER / f"{self.version}.clients"
        python, made = home / "bin/python", home / "made"
        with one_at_a_time(FOLDER):
            if is_stale(made, [ROOT / CLIENTS, self.home / "made"]):
                print(f"making an environment with the libraries of {CLIENTS}", flush=True)
                venv = [self.python, "-m", "venv", "--without-pip", home]
                subprocess.run(venv, check=True)
                (packages,) = home.glob("lib/python*/site-packages")
                (packages / "over.pth").write_text(f"import site; site.addsitedir({str(self.packages)!r})\n")
                install(python, self.version, [CLIENTS])
                made.touch()
        return python

    # ---- under torch

    def unit(self, source: Path, flags: list[str]) -> Unit:
        return Unit(source, self.folder / f"{source.stem}.o", tuple(flags), self.torch)

    def library(self, name: str, sources: tuple[str, ...], flags: list[str], *linking: str) -> Library:
        folders = {source: DEVICE if (DEVICE / f"{source}.cpp").exists() else SIMULATED for source in sources}
        units = tuple(self.unit(folder / f"{source}.cpp", flags) for source, folder in folders.items())
        return Library(self.folder / name, units, (soname(name), *linking))

    def with_library(self, *names: str) -> tuple[str, ...]:
        return (f"-L{self.folder}", *(f"-l:{name}" for name in names), "-Wl,-rpath,$ORIGIN")

    def device_libraries(self) -> list[Library]:
        flags = [*DEVICE_FLAGS, *including(cuda_include(), self.packages / "nvidia/nccl/include")]
        runtime = self.library(RUNTIME, ("runtime", "runtime_absent"), flags, *self.with_library(DRIVER))
        return [
            self.library(DRIVER, ("driver", "driver_absent", "device", "graph"), flags),
            replace(runtime, names=DEVICE / "runtime.map"),
            self.library(MANAGEMENT, ("nvml",), flags),
            self.library(NCCL, ("nccl", "nccl_absent"), flags, "-lrt", *self.with_library(DRIVER)),
        ]

    def operators(self) -> Library:
        headers = self.torch / "include"
        including_torch = including(
            headers, headers / "torch/csrc/api/include", cuda_include(), self.toolkit_headers()
        )
        of_torch = (f"-L{self.torch / 'lib'}", "-ltorch_cuda", "-lc10_cuda", "-ltorch_cpu", "-lc10")
        flags = [*TORCH_FLAGS, *including_torch, f"-I{SIMULATED}"]
        sources = ("operators", "operator_call", "held_operator", "cpu_tensors")
        return self.library("liboperators.so", sources, flags, *of_torch, *self.with_library(DRIVER))

    def toolkit_headers(self) -> Path:
        """Return the headers of CUDA libraries other than the runtime, included by ATen's headers."""
        return self.packages / "nvidia/cu13/include"

    # ---- fsdp_c's kernels

    def make_kernels(self) -> None:
        objects = self.folder / "cuda"
        settings = {"FSDP_C_CUDA": "1", "FSDP_C_CUDA_ARCHS": "90"}
        command = [str(self.python), "setup.py", "-q", "build_cuda", "--build-temp", str(objects)]
        # linked as in a wheel, with the static runtime, which needs a real driver
        folder = self.folder / "static"
        subprocess.run([*command, "--folder", str(folder)], cwd=ROOT, env=os.environ | settings, check=True)
        made = sorted(objects.glob("*.o"))
        emulated = Library(
            self.folder / "libfsdp_kernels.so",
            tuple(self.emulated(one) for one in made),
            (soname("libfsdp_kernels.so"), *self.with_library(RUNTIME)),
        )
        linking = ("-Wl,--no-as-needed", *self.with_library(RUNTIME, emulated.target.name))
        build([emulated, Library(self.folder / "_cuda.so", (), linking, tuple(made))], "fsdp_c's kernels")

    def emulated(self, made: Path) -> Unit:
        """Return the emulation of one object's kernels, compiled from their source under the mangled names
        that the object launches.
        """
        source = KERNELS / f"{made.stem}.cu"
        entries = (
            f'EMULATED("{mangled}", {str(barriers).lower()}, {name})'
            for mangled, name, barriers in kernels_of(made)
        )
        lines = [f'#include "{source}"', f'#include "{DEVICE}/kernels.h"', *entries, ""]
        wrapper = self.folder / f"emulated_{made.stem}.cpp"
        text = "\n".join(lines)
        if not wrapper.exists() or wrapper.read_text() != text:
            wrapper.write_text(text)
        flags = [*KERNEL_FLAGS, f"-I{ROOT / 'csrc'}", "-include", str(EMULATION)]
        return self.unit(wrapper, [*flags, "-Dfsdp_c_cuda_kernels=emulated_kernels"])


def including(*folders: Path) -> list[str]:
    return [word for folder in folders for word in ("-isystem", str(folder))]


def cuda_include() -> Path:
    """Return the folder of the toolkit's headers. Raises SystemExit without a toolkit."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in (*([Path(nvcc).resolve().parents[1]] if nvcc else []), *filter(None, homes)):
        if (Path(home) / "include/crt/host_config.h").exists():
            return Path(home) / "include"
    raise SystemExit("the CUDA toolkit is not found: put its nvcc on the path, or set CUDA_HOME")


def kernels_of(made: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield (mangled name, name without parameters, True if it has barriers) of the kernels that an object
    launches.
    """
    text = "".join(
        path.read_text() for pattern in ("*.cu", "cuda_*.h") for path in sorted(KERNELS.glob(pattern))
    )
    launched = {
        name: bool(barriers) for barriers, name in re.findall(r"\bENQUEUE(_WITH_BARRIERS)?\(\(?(\w+)", text)
    }
    mangled = sorted(set(re.findall(rb"\b_Z\w+", made.read_bytes())))
    names = output("c++filt", input=b"\n".join(mangled).decode()).splitlines()
    for one, name in zip(mangled, names, strict=True):
        plain = name.removeprefix("void ")
        base = re.match(r"\w+", plain)
        if base and base[0] in launched:
            yield one.decode(), without_parameters(plain), launched[base[0]]


def without_parameters(name: str) -> str:
    """Return the name up to its parameter list, the first parenthesis outside of template arguments."""
    depth = 0
    for at, char in enumerate(name):
        depth += (char == "<") - (char == ">")
        if char == "(" and depth == 0:
            return name[:at]
    return name


def output(*command: str, input: str) -> str:
    return subprocess.run(command, input=input, capture_output=True, text=True, check=True).stdout
