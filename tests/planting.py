"""Trees of files with planted violations, for tests of the checks that find them."""

from __future__ import annotations

from pathlib import Path


def plant(root: Path, files: dict[str, str]) -> None:
    """Write each text to its name below ``root``, creating folders."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
