"""Writes the API reference, from the docstrings, as a folder of HTML: ``make docs``. A warning is an
error."""

from __future__ import annotations

import argparse
import importlib
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pdoc
import torch

import fsdp_c

MODULES = ("fsdp_c.api", "fsdp_c.checkpoint", "fsdp_c.optim", "fsdp_c.wrap")
NOT_AS_MODULES = ("fsdp_c.checkpoint.model_state", "fsdp_c.checkpoint.optim_state")  # public as functions


get_source = pdoc.doc_ast.get_source


def source_of(thing: Any) -> str:
    """The source, empty for torch.Tensor: Python 3.13 looks for it in a file that does not have it."""
    return "" if thing is torch.Tensor else get_source(thing)


def build(folder: Path) -> None:
    """Write a page for fsdp_c and for each of MODULES into ``folder``; ``index.html`` leads to them.

    Raises what pdoc warns of: a name that cannot be found, or an annotation that cannot be read.
    """
    for name in MODULES:
        importlib.import_module(name)
    names = [name for name in dir(fsdp_c) if not name.startswith("_")]  # __all__ has torch's names alone
    with mock.patch.object(fsdp_c, "__all__", names), warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's
        warnings.filterwarnings("ignore", r"Cannot determine where fsdp_c\.FlatParameter\._is_param")
        pdoc.render.configure(docformat="google", show_source=False)
        with mock.patch.object(pdoc.doc_ast, "get_source", source_of):
            pdoc.pdoc("fsdp_c", *(f"!{name}" for name in NOT_AS_MODULES), output_directory=folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    build(parser.parse_args().folder)
