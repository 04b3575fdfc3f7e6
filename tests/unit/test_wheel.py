"""The wheel of ``pip install .``: abi3, without torch or C++ inside, and clear errors if torch is missing."""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools

from tests.wheel import SYSTEM, libraries, needed

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow  # wheels are compiled
SHIPPED = "csrc fsdp_c setup.py pyproject.toml MANIFEST.in README.md CHANGELOG.md LICENSE".split()


def call(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the shipped files, without optimisation to save time."""
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, *"-m pip wheel --no-build-isolation --no-deps --no-index -w wheels .".split()]
    done = call(*pip, cwd=source, FSDP_C_OPT="-O0")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = (source / "wheels").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on the path, holding nothing but the wheel's content."""
    target = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code outside the source tree, with ``path`` before the installed packages."""
    return call(sys.executable, "-c", code, cwd=path[0], PYTHONPATH=os.pathsep.join(map(str, path)))


def import_error(code: str, *path: Path) -> str:
    """Return the ImportError with which the code fails."""
    done = run_python(code, *path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(("ImportError: ", "ModuleNotFoundError: ")), last
    return last


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of setup.py."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


def test_wheel_fits_every_python_from_3_10(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name


def test_wheel_holds_the_extension_and_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"fsdp_c/_C.abi3.so", "fsdp_c/_C.pyi", "fsdp_c/py.typed", "fsdp_c/__init__.py"} <= names
    assert not any(name.startswith(("csrc", "tests", "build")) for name in names)


def test_wheel_requires_torch_and_numpy_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required == ["Requires-Dist: torch>=2.10", "Requires-Dist: numpy"]


def test_extension_links_against_libc_alone(wheel: Path) -> None:
    assert {"libc.so.6"} <= needed(libraries(wheel)["_C"]) <= SYSTEM


def test_import_without_torch_names_torch(installed: Path) -> None:
    assert "torch" in import_error("import sys; sys.modules['torch'] = None; import fsdp_c", installed)


def test_import_with_an_old_torch_names_both_versions(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.9.1'\n")
    error = import_error("import fsdp_c", tmp_path, installed)
    assert "2.10" in error and "2.9.1" in error


def test_importing_the_extension_before_torch_is_refused(installed: Path) -> None:
    code = (
        "import importlib.util as u; "
        f"spec = u.spec_from_file_location('fsdp_c._C', {str(installed / 'fsdp_c' / '_C.abi3.so')!r}); "
        "spec.loader.exec_module(u.module_from_spec(spec))"
    )
    assert "torch" in import_error(code, installed)


def test_a_missing_symbol_of_libtorch_is_named(installed: Path, tmp_path: Path) -> None:
    """The test replaces a required name in the extension by a name that no libtorch has."""
    broken = tmp_path / "broken"
    shutil.copytree(installed, broken)
    extension = broken / "fsdp_c" / "_C.abi3.so"
    name, absent = b"aoti_torch_get_storage_offset\0", b"aoti_torch_get_storage_0ffset\0"
    content = extension.read_bytes()
    assert name in content
    extension.write_bytes(content.replace(name, absent))
    assert absent[:-1].decode() in import_error("import fsdp_c", broken)


def test_a_compiler_that_cannot_optimise_across_files_is_not_asked_to(setup_py: dict[str, Any]) -> None:
    assert setup_py["link_time_flags"](["false"]) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_link_time_optimization_works_in_paths_with_spaces_and_quotes(tmp_path: Path) -> None:
    """With two partitions: gcc makes them by one makefile."""
    tree = tmp_path / "Ann's projects, #1" / "fsdp_c"
    (tree / "csrc").mkdir(parents=True)
    (tree / "fsdp_c").mkdir()
    shutil.copy(ROOT / "setup.py", tree)
    (tree / "pyproject.toml").write_text(
        '[project]\nname = "fsdp_c"\ndynamic = ["version"]\n[tool.setuptools]\npackages = ["fsdp_c"]\n'
    )
    (tree / "fsdp_c/__init__.py").write_text('__version__ = "0"\n')
    for name in ("one", "two"):
        (tree / f"csrc/{name}.c").write_text(f"int {name}(void);\nint {name}(void) {{ return 1; }}\n")
    (tree / "temporary files").mkdir()
    settings = {"TMPDIR": str(tree / "temporary files"), "FSDP_C_CUDA": "0"}
    settings["LDFLAGS"] = "-flto-partition=1to1"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = call(*command, "--build-temp", str(tree / "temporary files/objects"), cwd=tree, **settings)
    assert done.returncode == 0, done.stderr
    assert (tree / "fsdp_c/_C.abi3.so").exists()
    if "Free Software Foundation" in call("cc", "--version", cwd=tree).stdout:
        assert "-flto=auto" in (tree / "temporary files/objects/flags.json").read_text()


def test_headers_in_folders_with_spaces_are_known(setup_py: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "a b, #1 $c"
    folder.mkdir()
    (folder / "one.h").touch()
    (folder / "one.c").write_text('#include "one.h"')
    command = ["cc", "-MMD", "-c", str(folder / "one.c"), "-o", str(folder / "one.o")]
    assert call(*command, cwd=folder).returncode == 0
    assert setup_py["headers_of"](folder / "one.d") == [str(folder / name) for name in ("one.c", "one.h")]


def test_a_torch_for_the_cpu_is_found_where_the_build_cannot_import_it(
    setup_py: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check, pip would compile kernels that no torch loads."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    assert setup_py["cuda_of_torch"]() is None
    (tmp_path / "purelib" / "torch").mkdir(parents=True)
    version = tmp_path / "purelib" / "torch" / "version.py"
    version.write_text("cuda: str | None = '13.0'\n")
    assert setup_py["cuda_of_torch"]() == "13.0"
    version.write_text("cuda: str | None = None\n")
    assert setup_py["cuda_of_torch"]() == ""
    assert "computes on the CPU alone" in setup_py["why_no_cuda"]("nvcc", demanded=False)


LIBRARIES_OF_TORCH = {
    "libcudart.so.12": "int cudaRuntimeGetVersion(int *version) { *version = 12080; return 0; }",
    "libtorch_cuda.so": "int aoti_torch_get_current_cuda_stream(int device, void **stream) { return 1; }",
}


def test_kernels_of_another_cuda_than_torchs_are_left_alone(installed: Path, tmp_path: Path) -> None:
    """The fake libtorch_cuda.so links with a CUDA 12 runtime, which defines torch's CUDA version."""
    for name, code in LIBRARIES_OF_TORCH.items():
        (tmp_path / f"{name}.c").write_text(code)
        linking = [
            f"-Wl,-soname,{name},--no-as-needed",
            *("-Xlinker", f"-rpath={tmp_path}"),  # -Wl splits at commas
            *map(str, tmp_path.glob("*.so.12")),
        ]
        done = call("cc", "-shared", "-fPIC", f"{name}.c", "-o", name, *linking, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    library = installed / "fsdp_c" / "_cuda13.so"
    library.write_text("not a library, and not to be loaded")
    code = f"import ctypes, torch; ctypes.CDLL({str(tmp_path / 'libtorch_cuda.so')!r}); from fsdp_c import _C"
    done = run_python(f"{code}; print(_C.why_no_kernels('cuda'))", installed)
    library.unlink()
    assert "without its CUDA kernels for CUDA 12" in done.stdout, done.stdout + done.stderr
