"""Trees of files that hold a violation, for the tests of checks that look for one."""

from __future__ import annotations

from pathlib import Path


def plant(root: Path, files: dict[str, str]) -> None:
    """Write each text under its name below ``root``, in folders made for it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
