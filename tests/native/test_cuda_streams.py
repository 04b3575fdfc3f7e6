"""The streams and the pool of a GPU, without one: what they ask of torch.cuda and of the driver is written
down."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.native.cuda_streams import CASES
from tests.native.test_native import CSRC, NATIVE
from tests.processes import output_of_python

SOURCES = [
    NATIVE / "cuda_streams.c",
    *(CSRC / "torch" / name for name in ("stream.c", "stream_backend.c", "pool.c")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("streams")
    shared = ["cc", "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(
        [*shared, soname, str(NATIVE / "fake_libcuda.c"), "-o", str(made / "libcuda.so.1")], check=True
    )
    python = ["-DPy_LIMITED_API=0x030A0000", f"-I{sysconfig.get_paths()['include']}", f"-I{CSRC}"]
    subprocess.run([*shared, *python, *map(str, SOURCES), "-ldl", "-o", str(made / "streams.so")], check=True)
    return made


@pytest.mark.parametrize("case", CASES)
def test_streams_of_a_gpu(folder: Path, case: str) -> None:
    """Each in a process of its own: what the driver was found by, and its contexts, last as long as one."""
    output_of_python("-m", "tests.native.cuda_streams", folder, case, cwd=NATIVE.parents[1])
