"""Error wording: a message begins with the phrase of the same error in torch's FSDP1.

Users search for that phrase, and programs match it. Rank, unit, names and remedy follow.
"""

import sys
from collections.abc import Collection, Sequence
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


# suffix of errors that recommend ignoring a parameter
IGNORED_AND_TRAINED = (
    "If it is trained, give all ranks equal values at the start and average its gradients by hand"
)
_NAMES_SHOWN = 10


def first_names(names: Collection[object]) -> str:
    """Format the first ten ``names`` as a list, and the number of the rest."""
    more = len(names) - _NAMES_SHOWN
    return f"{list(names)[:_NAMES_SHOWN]}" + (f" and {more} more" if more > 0 else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks: ``rank 3``, ``ranks 0 to 2``, ``ranks 0, 2, 5 to 7``."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    parts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    return ("ranks " if len(runs) > 1 or runs[0][0] < runs[0][1] else "rank ") + ", ".join(parts)


def with_note(error: Error, note: str) -> Error:
    """Add ``note`` to ``error`` and return it, for errors whose exact message programs match.

    Before Python 3.11, without exception notes, the note is a second line of the message.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    return error
