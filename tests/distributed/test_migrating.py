"""Every block of code in docs/migrating.md runs, in order, on 2 ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

import fsdp_c
from tests.ranks import close_pools, pool

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrating.md"


class Code(NamedTuple):
    text: str
    line: int  # first line


def of_language(language: str) -> list[Code]:
    page = PAGE.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [Code(match[1], page.count("\n", 0, match.start(1)) + 1) for match in found]


def run_python(rank: int, world_size: int, folder: str) -> int:
    """Run the blocks in one module, as a reader would type them, and return their number."""
    module = ModuleType("migrating")
    before = os.getcwd()
    os.chdir(folder)
    try:
        sys.modules["migrating"] = module  # all other modules imported by the page stay
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            for block in of_language("python"):
                at_its_line = "\n" * (block.line - 1) + block.text  # gives tracebacks the page's line numbers
                exec(compile(at_its_line, str(PAGE), "exec"), vars(module))
    finally:
        del sys.modules["migrating"]
        fsdp_c.uninstall()
        os.chdir(before)
    return len(of_language("python"))


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    python, bash = of_language("python"), of_language("bash")
    assert PAGE.read_text().count("```") == 2 * len(python + bash)
    assert python
    assert (
        pool(2, "migrating").run(__name__, "run_python", {"folder": str(tmp_path)}, timeout_s=400)
        == [len(python)] * 2
    )
    close_pools("migrating")  # fsdp_c cannot be installed where other tests have live units of torch
    for block in bash:
        run_bash(block, tmp_path)


def run_bash(block: Code, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{PAGE}:{block.line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
