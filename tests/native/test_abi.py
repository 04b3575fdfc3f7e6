"""The hand-written prototypes of libtorch's C ABI match torch's headers."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def check_syntax(source: Path, header_folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the static_asserts of ``source`` by compiling it without output."""
    command = [str(COMPILER), "-std=c++17", "-fsyntax-only", f"-I{header_folder}"]
    command += [f"-isystem{path}" for path in include_paths()]
    return subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=300)


def test_prototypes_match_torch_headers() -> None:
    result = check_syntax(ROOT / "tests/native/abi_check.cpp", ROOT / "csrc")
    assert result.returncode == 0, result.stderr


def test_a_drifted_prototype_is_named(tmp_path: Path) -> None:
    header = (ROOT / "csrc/torch/torch_abi.h").read_text()
    drifted = re.sub(
        r"aoti_torch_get_dim, \(AtenTensorHandle tensor, int64_t",
        "aoti_torch_get_dim, (AtenTensorHandle tensor, int32_t",
        header,
    )
    assert drifted != header
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/torch_abi.h").write_text(drifted)
    result = check_syntax(ROOT / "tests/native/abi_check.cpp", tmp_path)
    assert result.returncode != 0
    assert "aoti_torch_get_dim" in result.stderr
