"""Time and memory that ranks spend on a save and a load of a large model besides moving data, for up to
thousands of ranks, in one process.

python -m benchmarks.checkpoint_plans
python -m benchmarks.checkpoint_plans --ranks 128 512 2048 16384 --markdown table.md
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from fsdp_c import _C
from fsdp_c.checkpoint import contents, layout_file
from fsdp_c.checkpoint.folder import (
    LAYOUT,
    METADATA,
    Footer,
    file_of,
    read_footer,
    size_and_crc32,
    with_footer,
)
from fsdp_c.checkpoint.metadata import metadata_content
from fsdp_c.checkpoint.planning import RECORD, RankResult, merge_plans, places_of, put_records
from fsdp_c.checkpoint.storage import Item, items_of, read_checkpoint
from fsdp_c.checkpoint.values import RangeTensor
from fsdp_c.checkpoint.writing import Writer

H, F, E, D, X = 8192, 28672, 256, 7168, 2048
DENSE = {
    "wq": (H, H),
    "wk": (1024, H),
    "wv": (1024, H),
    "wo": (H, H),
    "w1": (F, H),
    "w2": (H, F),
    "w3": (F, H),
}
MOE = {"q": (1536, D), "kv": (576, D), "qb": (24576, 1536), "kvb": (32768, 512), "o": (D, 16384)}
MODELS: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    "70B": (80, DENSE | {"norm1": (H,), "norm2": (H,)}),
    "experts": (61, MOE | {"norm1": (D,), "norm2": (D,), "w1": (E, X, D), "w2": (E, D, X), "w3": (E, X, D)}),
}
STATES = ("exp_avg", "exp_avg_sq")
HEADINGS = [
    "model",
    "ranks",
    "pieces",
    "plan B",
    "local ms",
    "rank 0 s",
    "table s",
    ".metadata s",
    "MB",
    "layout s",
]
HEADINGS += ["MB", "rank 0 +MB", "check s", "load ms", "load +MB"]
DATA = "fsdp_c-data-000000000000"
COUNTED = """\
"plan B": size of the plan that a rank sends; "local ms": longest time of a rank to make its plan; "rank 0 s": time of
each rank to decide on all plans; "table s": time to merge the results of all writes and to write `.metadata` and
`fsdp_c.layout`, followed by the sizes of both; "check s": time of one loading rank to compare both files with their
checksums; "load": time of one rank, of three quarters as many ranks, from the layout to the list of its reads. Files
with data are not read. Times are processor time; "+MB" is the growth of resident memory.
"""


def resident_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def ranges(
    shapes: dict[str, tuple[int, ...]], ranks: int, rank: int
) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Yield the layer's parameters of which the rank has elements: name, shape, offset of the first element
    and number of elements.
    """
    layout = _C.FlatLayout([math.prod(shape) for shape in shapes.values()], 8, ranks, rank, True)
    for (name, shape), (inside, _, numel, start) in zip(shapes.items(), layout.shard_ranges(), strict=True):
        if inside and numel:
            yield name, shape, start, numel


def state_of(model: str, ranks: int, rank: int) -> dict[str, Any]:
    layers, shapes = MODELS[model]
    own: dict[str, Any] = {}
    states: dict[str, Any] = {}
    step = torch.tensor(1.0)
    for name, shape, start, numel in ranges(shapes, ranks, rank):
        local = torch.empty(numel, device="meta")
        for layer in range(layers):
            own[f"layers.{layer}.{name}"] = RangeTensor(local, shape, start)
            state = {each: RangeTensor(local, shape, start) for each in STATES}
            states[f"layers.{layer}.{name}"] = {"step": step, **state}
    return {"model": own, "optim": {"state": states}}


def made_up(writer: Writer, plan: Any, rank: int) -> RankResult:
    """Return the result that a rank would send about its file."""
    records = []
    for number, positions in writer.planned.shares[rank]:
        held = plan[number].held
        count = len(positions) * (len(held.boxes()) if held else 1)
        records.append(
            b"".join(RECORD.pack(at * 1000, 400, at * 2654435761 % 2**32, rank) for at in range(count))
        )
    return RankResult(2**40, 0, records)


def measured(model: str, ranks: int, folder: Path) -> list[str]:
    longest, sent, first = 0.0, [], None
    for rank in range(ranks):
        state, paths = flatten_state_dict(state_of(model, ranks, rank))
        writer = Writer(state, paths, folder, {})
        start = time.process_time()
        sent.append(pickle.dumps(writer.plan()[0]))
        longest = max(longest, time.process_time() - start)
        first = first or writer
    assert first is not None
    gc.collect()
    before, start = resident_mb(), time.process_time()
    plans = [pickle.loads(each) for each in sent]
    first.planned = merge_plans(plans)
    times = [time.process_time() - start]
    grown = resident_mb() - before
    results = {rank: made_up(first, plan, rank) for rank, plan in enumerate(plans)}
    pieces = sum(len(one) for each in results.values() for one in each.records) // RECORD.size
    before, start, groups = resident_mb(), time.process_time(), first.planned.groups
    put_records(first.planned, results)
    places = places_of(groups, first.state)
    times.append(time.process_time() - start)
    files = {rank: f"{DATA}/{file_of(rank)}" for rank in results}
    listed = {file_of(rank): (2**40, 0) for rank in results}
    top = 0.0
    (folder / DATA).mkdir()
    contents = {
        "pickled": metadata_content(groups, places, folder, files),
        f"{DATA}/{LAYOUT}": layout_file.layout_content(groups, places),
    }
    for name, content in contents.items():
        start = time.process_time()
        with (folder / name).open("wb") as file:
            for part in content:
                file.write(part)
                top = max(top, resident_mb())
        times.append(time.process_time() - start)
    sizes = [(folder / name).stat().st_size / 1e6 for name in contents]
    listed[LAYOUT] = size_and_crc32(folder / DATA / LAYOUT)
    whole = with_footer([(folder / "pickled").read_bytes()], Footer(DATA, listed))
    (folder / METADATA).write_bytes(b"".join(whole))
    grown += top - before
    plan_nbytes = sum(map(len, sent)) // ranks
    del groups, places, results, plans, sent, first
    gc.collect()
    start = time.process_time()
    footer = read_footer(folder, compare=True)
    assert footer is not None and size_and_crc32(folder / DATA / LAYOUT) == footer.files[LAYOUT]
    check = time.process_time() - start
    load, load_mb = loading(model, ranks, folder)
    numbers = [plan_nbytes, f"{longest * 1e3:.0f}", *(f"{each:.2f}" for each in times[:3]), f"{sizes[0]:.0f}"]
    numbers += [f"{times[3]:.2f}", f"{sizes[1]:.0f}", f"{grown:.0f}", f"{check:.2f}"]
    numbers += [f"{load * 1e3:.0f}", f"{load_mb:.0f}"]
    return [model, *map(str, [ranks, pieces, *numbers])]


def loading(model: str, ranks: int, folder: Path) -> tuple[float, float]:
    """Return the time and memory of one rank's plan of a load."""
    sizes = {f"{DATA}/{file_of(rank)}": 2**40 for rank in range(ranks)}
    layers, shapes = MODELS[model]
    fewer = max(1, ranks * 3 // 4)
    wanted = [*ranges(shapes, fewer, fewer // 2)]
    before, start = resident_mb(), time.process_time()
    given = {"folder": folder, "sizes": sizes}
    with mock.patch.object(contents.Checkpoint, "__init__", lambda self, *_: vars(self).update(given)):
        found = read_checkpoint(folder, compare=False)
    items: list[Item] = []
    for layer in range(layers):
        for name, shape, begin, numel in wanted:
            key = f"layers.{layer}.{name}"
            for each in (f"model.{key}", *(f"optim.state.{key}.{state}" for state in STATES)):
                entry = found.entries[each]
                assert isinstance(entry, contents.TensorEntry)
                for offsets, sizes in _C.flat_range_boxes(shape, begin, begin + numel):
                    items += items_of(each, entry, offsets, torch.empty(sizes, device="meta"))
    took = time.process_time() - start
    assert sum(item.target.numel() for item in items) == layers * 3 * sum(numel for *_, numel in wanted)
    return took, resident_mb() - before


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.checkpoint_plans", description=__doc__)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[128, 512, 2048],
        help="numbers of ranks (default: 128 512 2048)",
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=[*MODELS], help="models (default: all)"
    )
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    rows = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)]]
    print(COUNTED)
    print(" | ".join(HEADINGS))
    for model in args.models:
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measured(model, ranks, Path(folder)))
            print(" | ".join(rows[-1]), flush=True)
    if args.markdown:
        args.markdown.write_text("".join(f"| {' | '.join(row)} |\n" for row in rows))


if __name__ == "__main__":
    main()
