"""What each wait of the runtime is worth on the simulated GPU: left out in turn, in programs in which order
matters.

python -m tests.simulated_gpu -m tests.races.report [--markdown FILE] [--jobs N] [--every N] [PROGRAM ...]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import platform
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.races.programs import one_of_four
from tests.races.waits import CHOSEN, Found, Kind, look, reasons_of

EXPLAINED = """\
Each wait for an event that fsdp_c asked of the driver, of a stream or of the host, was left out in a run of its own.
'known': what it waited for was known already. 'caught': something was reported, a race or memory given back early,
which with all waits it is not. 'implied': all launches and allocations are in the same order without it, by others.
'spare': none of these; 'which' says who waited there for whom, and how often. One rank of four, the others imagined.
"""


_entered = contextlib.ExitStack()  # of a process of the pool, until it ends


def begin() -> None:
    torch.set_num_threads(1)
    _entered.enter_context(one_of_four())


def name_of(kind: Kind) -> str:
    return f"{kind[0]} for {kind[1]}"


def row(found: Found) -> list[str]:
    spare = Counter(wait.kind for wait in found.spare)
    which = ", ".join(f"{name_of(kind)}: {count}" for kind, count in sorted(spare.items()))
    counts = [found.waits, found.known, found.caught, found.implied, found.spare]
    return [found.program, *(str(len(waits)) for waits in counts), which]


def by_kind(all_found: list[Found]) -> list[list[str]]:
    rows = []
    fields = ("waits", "known", "caught", "implied", "spare")
    counts = [Counter(wait.kind for found in all_found for wait in getattr(found, field)) for field in fields]
    for kind in sorted(counts[0]):
        spare = [found for found in all_found if any(wait.kind == kind for wait in found.spare)]
        told = (reasons_of(found.program, found.all_waits) for found in spare)
        reasons = dict.fromkeys(reasons.get(kind, "nothing known") for reasons in told)
        rows.append([name_of(kind), *(str(count[kind]) for count in counts), "; ".join(reasons)])
    return rows


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    rules = ["---", *["---:"] * (len(heads) - 2), "---"]
    return ["| " + " | ".join(cells) + " |" for cells in (heads, rules, *rows)]


def markdown(all_found: list[Found], every: int) -> str:
    text = [f"# Waits of streams on the simulated GPU, {time.strftime('%Y-%m-%d')}", "", EXPLAINED]
    if every > 1:
        text += [f"Of the waits of each program one in {every} was tried.", ""]
    text += [f"torch {torch.__version__}, CPython {platform.python_version()}", ""]
    heads = ["waits", "known", "caught", "implied", "spare"]
    text += table(["program", *heads, "which"], [row(found) for found in all_found])
    text += ["", *table(["who waits for whom", *heads, "what spare ones are for"], by_kind(all_found))]
    reports = sorted({line for found in all_found for line in found.reports})
    text += ["", "Reported with all waits:", "", *(f"- {line}" for line in reports or ["nothing"])]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="one wait in N, always the same ones"
    )
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    all_found = []
    with ProcessPoolExecutor(args.jobs, context, begin) as pool:
        for found in pool.map(functools.partial(look, stride=args.every), args.programs or CHOSEN):
            all_found.append(found)
            print(" | ".join(row(found)), flush=True)
            if args.markdown:
                args.markdown.write_text(markdown(all_found, args.every))


if __name__ == "__main__":
    main()
