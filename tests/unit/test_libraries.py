"""Libraries of C++ that tests run on are linked anew where what they are made of is newer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.libraries import Library, Unit


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_library_is_linked_anew_when_the_names_that_it_shows_change(tmp_path: Path) -> None:
    folder = tmp_path / "a b, c"
    folder.mkdir()
    source, made, names = (folder / name for name in ("one.cpp", "one.o", "names.map"))
    source.write_text('extern "C" int first() { return 1; } extern "C" int second() { return 2; }\n')
    subprocess.run(["g++", "-fPIC", "-c", str(source), "-o", str(made)], check=True)
    library = Library(folder / "libone.so", (), further=(made,), names=names)
    for at, shown in enumerate(("first", "second")):
        names.write_text(f"{{ global: {shown}; local: *; }};\n")
        os.utime(names, (2e9 + at, 2e9 + at))
        library.link()
        os.utime(library.target, (2e9 + at, 2e9 + at))
        symbols = subprocess.run(["nm", "-D", library.target], capture_output=True, text=True, check=True)
        assert symbols.stdout.split()[-1:] == [shown]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_unit_is_stale_when_a_header_of_it_changes_wherever_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / "a b, #1 $c"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/version.py").touch()
    (folder / "one.h").write_text("inline int one() { return 1; }\n")
    (folder / "one.cpp").write_text('#include "one.h"\nint two() { return 2 * one(); }\n')
    unit = Unit(folder / "one.cpp", folder / "one.o", (), folder / "torch")
    assert unit.is_stale()
    unit.compile()
    assert not unit.is_stale()
    os.utime(folder / "one.h", (2e9, 2e9))
    assert unit.is_stale()
