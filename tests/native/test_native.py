"""Compiles and runs each native C program, with sanitizers if the compiler has them."""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.settings import EXHAUSTIVE, PATIENCE

NATIVE = Path(__file__).resolve().parent
CSRC = NATIVE.parents[1] / "csrc"
PROGRAMS = sorted(NATIVE.glob("test_*.c"))
STRICT = (
    "-std=c11 -Wall -Wextra -Wno-unused-parameter -Wshadow -Wstrict-prototypes -Wmissing-prototypes".split()
)
STRICT += ["-Werror"]
TIMEOUT_S = (1800 if EXHAUSTIVE else 120) * PATIENCE
FUZZ_COUNT = {"FSDP_C_FUZZ_COUNT": "1000000"} if EXHAUSTIVE else {}
# Invariants are checked, allocations can be made to fail, and Python's headers are there, but no Python.
DEFINES = ["-DFSDP_C_CHECK", "-DMEM_FAULTS", "-DPy_LIMITED_API=0x030A0000"]
INCLUDES = [f"-I{CSRC}", f"-I{NATIVE}", f"-I{sysconfig.get_paths()['include']}"]
# Drops unreachable functions at link time.
SECTIONS = ["-ffunction-sections", "-fdata-sections"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture(scope="module")
def sanitizers(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the sanitizer flags; empty if the compiler or its runtime lacks them."""
    folder = tmp_path_factory.mktemp("sanitizers")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    command = [compiler, *SANITIZE, str(folder / "empty.c"), "-o", str(folder / "empty")]
    compiled = subprocess.run(command, capture_output=True).returncode == 0
    return SANITIZE if compiled and run(folder / "empty").returncode == 0 else []


def run(program: Path) -> subprocess.CompletedProcess[str]:
    """Run without what the environment may preload: a sanitizer's runtime has to come first."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | FUZZ_COUNT
    # the leak check needs ptrace, which containers refuse: the programs count their allocations instead
    environment["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
    return subprocess.run([program], capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)


def compile_with(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def linked_sources(source: Path) -> list[str]:
    """Return the files under csrc in the program's ``links:`` comment."""
    links = re.match(r"/\* links: ([^*]+) \*/", source.read_text())
    assert links is not None, f"{source.name} must begin with a comment 'links: FILE...', relative to csrc"
    return [str(CSRC / name) for name in links[1].split()]


@pytest.mark.parametrize("source", PROGRAMS, ids=lambda source: source.stem)
def test_native_program_passes(source: Path, compiler: str, sanitizers: list[str], tmp_path: Path) -> None:
    program = tmp_path / source.stem
    flags = [*STRICT, *sanitizers, "-g1", "-O1", *SECTIONS, *DEFINES, *INCLUDES]
    sources = [str(source), *linked_sources(source)]
    objects = [str(tmp_path / f"{index}.o") for index in range(len(sources))]
    commands = [
        [compiler, *flags, "-c", one, "-o", target] for one, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(compile_with, commands))
    linking = ["-Wl,--gc-sections", "-lm", "-lpthread"]
    linked = compile_with([compiler, *flags, *objects, *linking, "-o", str(program)])
    assert not any(command.returncode for command in (*built, linked)), "\n".join(
        command.stderr for command in (*built, linked)
    )
    result = run(program)
    assert result.returncode == 0, result.stdout + result.stderr
