"""The CUDA kernels without a GPU: emulated and compared with the CPU's kernels. nvcc compiles them in .ci/wheel."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.libraries import KERNEL_FLAGS
from tests.native.test_native import CSRC, NATIVE, compiler, run, sanitizers  # noqa: F401  (fixtures)

KERNELS = CSRC / "kernels"
EMULATION = [*KERNEL_FLAGS, "-O0", "-g", "-Wshadow", f"-I{CSRC}", f"-I{NATIVE}"]
EMULATION += ["-DMAX_STRIDED_NUMEL=5000", "-DCUDA_THREADS=32"]
EMULATION += ["-include", str(NATIVE / "cuda_emulation.h"), "-x", "c++"]
C = ["-std=c11", "-O1", "-g", "-ffp-contract=off", f"-I{CSRC}"]


def compile_to(output: Path, *command: str) -> None:
    done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_every_kernel_of_the_cpu_has_a_twin() -> None:
    sources = {path.stem for path in KERNELS.glob("*.c") if not path.stem.startswith(("blocks", "loops"))}
    assert {path.stem for path in KERNELS.glob("*.cu")} == sources


def test_emulated_kernels_equal_the_cpus(tmp_path: Path, sanitizers: list[str]) -> None:  # noqa: F811
    objects = {path: tmp_path / f"{path.name}.o" for path in sorted(KERNELS.glob("*.c*"))}
    objects[NATIVE / "cuda_kernels.cpp"] = tmp_path / "main.o"

    def compile_one(source: Path) -> None:
        if source.suffix == ".c":  # C sources are covered by test_native.py
            compile_to(objects[source], "cc", *C, "-c", str(source))
        else:
            compile_to(objects[source], "c++", *sanitizers, *EMULATION, "-c", str(source))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, objects))
    compile_to(tmp_path / "kernels", "c++", *sanitizers, *map(str, objects.values()), "-lm")
    result = run(tmp_path / "kernels")
    assert result.returncode == 0, result.stdout + result.stderr
