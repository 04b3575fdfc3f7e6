"""Hooks of `mkdocs build`: add the README as first page and the API reference, remove links out of the site."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
NO_PAGE = r"\.\./[^)\s]+|(?:benchmarks|examples|tests|CONTRIBUTING|SECURITY)[^)\s]*|[\w.]+\.py"
OUT = re.compile(rf"\[([^\]]+)\]\((?:{NO_PAGE})\)")


def on_files(files: Files, config: Any) -> Files:
    """Add index.md and api/."""
    readme = (DOCS.parent / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    reference = runpy.run_path(str(DOCS / "reference.py"))
    with tempfile.TemporaryDirectory() as folder:
        reference["build"](Path(folder))
        for page in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            name = f"api/{page.relative_to(folder).as_posix()}"
            files.append(File.generated(config, name, content=page.read_bytes()))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Replace links to files that are no pages by their text."""
    return OUT.sub(r"\1", markdown)
