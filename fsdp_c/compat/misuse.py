"""What is done about mistakes in a script that would train wrong without a word: FSDP_C_MISUSE says it."""

from __future__ import annotations

import os
import sys
import warnings

VARIABLE = "FSDP_C_MISUSE"
_MODES = ("error", "warn", "off")


def mode() -> str | None:
    """What FSDP_C_MISUSE says; None where it says nothing."""
    chosen = os.environ.get(VARIABLE) or None
    if chosen not in (None, *_MODES):
        raise ValueError(f"{VARIABLE} is {chosen!r}: set it to error, warn or off")
    return chosen


def is_looked_for() -> bool:
    return mode() != "off"


def tell(message: str, *, is_certain: bool) -> None:
    """RuntimeError where the result is wrong for certain, else a warning, at the line of the script; or as
    chosen."""
    chosen = mode() or ("error" if is_certain else "warn")
    if chosen == "error":
        raise RuntimeError(f"{message} ({VARIABLE}=warn in the environment goes on all the same.)")
    if chosen == "warn":
        warnings.warn(message, stacklevel=script_level())


def script_level() -> int:
    """How far above the caller the script is: backwards come through modules of torch's, forwards do not."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "torch",
        "fsdp_c",
    ):
        frame, level = frame.f_back, level + 1
    return level
