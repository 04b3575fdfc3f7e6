"""How errors are worded: they begin with the phrase by which the same error of torch's FSDP1 is known.

Users search for it, and programs match it. What follows is ours: rank, unit, names, remedy.
"""

import sys
from collections.abc import Collection, Sequence
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


# in errors, after an advice to ignore a parameter
IGNORED_AND_TRAINED = (
    "If it is trained, give all ranks equal values at the start and average its gradients by hand"
)
_NAMES_SHOWN = 10


def first_names(names: Collection[object]) -> str:
    """``names`` as a list, of which a message shows ten, and the number of the rest."""
    more = len(names) - _NAMES_SHOWN
    return f"{list(names)[:_NAMES_SHOWN]}" + (f" and {more} more" if more > 0 else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 2``, ``ranks 0, 2, 5 to 7``."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    parts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    return ("ranks " if len(runs) > 1 or runs[0][0] < runs[0][1] else "rank ") + ", ".join(parts)


def with_note(error: Error, note: str) -> Error:
    """``error`` with ``note`` under its message, for a message that programs match to its end.

    Before Python 3.11, which cannot note anything on an exception, the note is a second line of the message.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    return error
