"""Time and memory of a training step of FSDP1, FSDP2 and fsdp_c on a modelled machine; no GPU is needed.

python -m benchmarks.timeline                                 # 6.7 B parameters on 8 GPUs
python -m benchmarks.timeline --model 0.4B 1.3B --machine ib512 ethernet64
python -m benchmarks.timeline --impl fsdp_c --most 9 --picture step.png --trace step.json
python -m benchmarks.timeline --machine my_machine.json --markdown table.md
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timeline.published import ROWS, compare, report
from benchmarks.timeline.row import ALONE, IMPLEMENTATIONS, MACHINES, Result, Row, in_a_process, machine_of
from benchmarks.timeline.shapes import MODELS, SMALL_TO_LARGE

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
# options of a row that are also flags of the command line
OPTIONS = (
    "batch",
    "forward_prefetch",
    "free_host",
    "offload",
    "ahead",
    "recompute",
    "clip",
    "adapters",
)
OPTIONS += ("accumulate", "no_sync", "reduce_in_bf16", "keep_last")
NEAR = 1.01  # a schedule this near to the bound counts as optimal
ABOUT = """\
Each row is a process that computes nothing: the simulated GPU (docs/testing.md) follows shapes, streams, events and
torch's allocator, and predicts when each launch begins and ends (docs/testing.md lists the rules and their limits). The
process is rank 0 of the machine's ranks. Models are Llama's or MPT's (titan: Llama with norms, rotary positions and
loss in fp32, as in torchtitan), in bf16 with fp32 shards and reductions, one unit per block, with fused AdamW. Numbers
are of the fourth step.

  bound     max(the model's own computation + the first all-gather + the last reduction, all communication) + optimizer,
            each the shortest among the implementations: no schedule of these collectives is faster
  between   MiB allocated between steps, with gradients cleared by zero_grad()
  step      with contention between kernels, copies and collectives, and with late ranks if the machine's file says how
            often
  plain     the step without contention; compute and communication are without it too
  exposed   the computing stream is idle while a collective runs
  host      the computing stream is idle because the host has not launched the next ready work yet

The host costs 5 us per operator, 1.5 per view and event, 2.5 per launch of a library's own kernel, 8 per collective,
and for an FSDP's own work per unit and step the measurement of benchmarks.host_overhead with 12 parameters and bf16, on
a core on which operators cost about as much: FSDP1 840 us, FSDP2 1005, fsdp_c 50. --free-host sets all of these to 0.
"""


# ---- the table


@dataclass(frozen=True)
class Bound:
    """A lower bound on the step of any schedule of these collectives, at their shortest."""

    computation_ms: float  # the model's computation, the first all-gather and the last reduction
    communication_ms: float
    optimizer_ms: float

    @property
    def ms(self) -> float:
        return max(self.computation_ms, self.communication_ms) + self.optimizer_ms


def bound_of(alone: Result, results: list[Result]) -> Bound:
    ends = min(result.ends_ms for result in results)
    communication = min(result.communication_ms for result in results)
    optimizer = min(result.optimizer_ms for result in results)
    return Bound(alone.compute_ms + ends, communication, optimizer)


def obstacle(result: Result, alone: Result, bound: Bound) -> str:
    """Return the reason why the step is longer than the bound: the longest stall of the computing stream or
    of the wire.
    """
    if result.step_ms <= NEAR * bound.ms:
        return ""
    if bound.communication_ms > bound.computation_ms:
        found = [(us / 1e3, f"{what} waits for {why}") for us, what, why in result.of_wire]
    else:
        found = [(us / 1e3, f"{what} waits for {why}") for us, what, why in result.avoidable]
        found += [
            (result.compute_ms - result.optimizer_ms - alone.compute_ms, "kernels beside the model's own"),
            (result.slowed_ms, "kernels share the device"),
        ]
    ms, text = max(found)
    return f"{ms:.1f} ms: {text}"


def more_of(row: Row) -> str:
    parts = [f", recompute {row.recompute}"] * bool(row.recompute) + [", clipped"] * row.clip
    parts += [f", {row.accumulate} backwards"] * (row.accumulate > 1) + [", without reductions"] * row.no_sync
    parts += [", adapters"] * row.adapters
    return "".join(parts + [", reduced in bf16"] * row.reduce_in_bf16)


def table(results: list[Result], alone: Result) -> str:
    """Return the Markdown table of one model on one machine."""
    row, bound = results[0].row, bound_of(alone, results).ms
    machine = machine_of(row.machine)
    sequence = row.sequence or MODELS[row.model].sequence
    lines = [
        f"**{row.model} on {row.machine}** ({machine['title']}), {row.strategy}, {row.batch} x {sequence} "
        f"tokens per GPU{more_of(row)}: bound {bound:.1f} ms, the model alone {alone.compute_ms:.1f}",
        "",
        "| | step ms | / bound | allocated MiB | reserved MiB | between steps | plain | compute | "
        "communication | exposed | host |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        prefetches = each.row.forward_prefetch and each.row.implementation != "torch.fsdp2"
        name = each.row.implementation + (", forward_prefetch" if prefetches else "")
        name += (
            f", {each.row.ahead} ahead" if each.row.ahead != 1 and each.row.implementation == "fsdp_c" else ""
        )
        times = (each.plain_ms, each.compute_ms, each.communication_ms, each.exposed_ms, each.host_ms)
        lines.append(
            f"| {name} | {each.step_ms:.1f} | {each.step_ms / bound:.3f} | {each.allocated_MiB:.0f} | "
            f"{each.reserved_MiB:.0f} | {each.between_MiB:.0f} | "
            + " | ".join(f"{time:.1f}" for time in times)
            + " |"
        )
    return "\n".join(lines)


# ---- tables with one line per model and machine

STANDARD = [
    *(
        {"model": model, "machine": machine}
        for machine in ("nvlink8", "ib512", "ethernet64")
        for model in SMALL_TO_LARGE
    ),
    {"model": "0.4B", "machine": "nvlink8", "sequence": 256},
    {"model": "1.3B", "machine": "nvlink8", "batch": 8},
    {"model": "0.4B", "machine": "ib512", "sequence": 4096, "batch": 4},
    {"model": "1.3B", "machine": "nvlink8", "strategy": "SHARD_GRAD_OP"},
    {"model": "1.3B", "machine": "ib512", "strategy": "SHARD_GRAD_OP"},
    {"model": "1.3B", "machine": "ib512", "strategy": "HYBRID_SHARD"},
    {"model": "1.3B", "machine": "ethernet64", "strategy": "HYBRID_SHARD"},
    {"model": "0.4B", "machine": "nvlink8", "offload": True},
]
MORE = [
    {"model": "llama3-8b", "machine": "ib512", "recompute": "operators", "clip": True},
    {"model": "6.7B", "machine": "nvlink8", "recompute": "full", "accumulate": 4},
    {"model": "1.3B", "machine": "ib512", "accumulate": 4, "no_sync": True},
    {"model": "mpt-7b", "machine": "ib512", "batch": 4, "reduce_in_bf16": True},
    {"model": "mixtral-8x7b", "machine": "ib512", "recompute": "full"},
    {"model": "6.7B", "machine": "nvlink8", "adapters": True},
]
LINES_HEAD = "| | bound | FSDP1 | FSDP2 | fsdp_c | / bound | ahead | obstacle |\n" + 8 * "|---" + "|"


def line(results: list[Result], alone: Result) -> str:
    """Return one line of text: for each implementation the step in ms (plain, exposed communication) and the
    peaks of requested, allocated and reserved MiB; then the time that the last one saves over the faster of
    the others.
    """
    row, bound = results[0].row, bound_of(alone, results)
    what = [row.model, row.machine, *([row.strategy] if row.strategy != "FULL_SHARD" else [])]
    what += ["CPU offload"] * row.offload
    what.append(f"{row.batch} x {row.sequence or MODELS[row.model].sequence}{more_of(row)}")
    cells = [
        f"{each.step_ms:.1f} ({each.plain_ms:.1f}, {each.exposed_ms:.1f}) "
        f"{each.requested_MiB:.0f} / {each.allocated_MiB:.0f} / {each.reserved_MiB:.0f}"
        for each in results
    ]
    *others, ours = results
    ahead = 1 - ours.step_ms / min(each.step_ms for each in others)
    cells += [f"{ours.step_ms / bound.ms:.3f}", f"{100 * ahead:.1f} %", obstacle(ours, alone, bound)]
    return " | ".join([f"| {', '.join(what)}", f"{bound.ms:.1f}", *cells]) + " |"


def lines_of_standard() -> list[str]:
    lines = [LINES_HEAD]
    print(LINES_HEAD, flush=True)
    with ThreadPoolExecutor(2) as pool:
        for settings in STANDARD + MORE:
            rows = [Row(implementation=name, **settings) for name in (ALONE, *IMPLEMENTATIONS)]  # type: ignore[arg-type]
            alone, *results = pool.map(in_a_process, rows)
            lines.append(line(results, alone))
            print(lines[-1], flush=True)
    return lines


def lines_of_blocks(blocks: list[tuple[int, int, str]]) -> list[str]:
    return [
        f"{n * count / 2**20:9.1f} MiB  {count} x {n / 2**20:.2f} of {whose}" for n, count, whose in blocks
    ]


def most_of(result: Result) -> str:
    """Return the longest waits and the largest blocks in memory."""
    name = result.row.implementation
    waits = [f"{us / 1e3:9.3f} ms  {what}, for {why}" for us, what, why in result.stalls]
    parts = [
        f"waits of the computing stream of {name}:", *waits, "",
        f"memory in use at the peak of {name}:", *lines_of_blocks(result.at_peak), "",
        "reserved and unused memory at the peak, by segment:", *lines_of_blocks(result.idle),
    ]  # fmt: skip
    return "\n".join(parts)


def draw(paths: dict[str, str], path: str) -> None:
    import pickle

    from benchmarks.timeline import stalls

    steps = {name: pickle.loads(Path(spans).read_bytes()) for name, spans in paths.items()}
    stalls.picture(steps, path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timeline",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = sorted(path.stem for path in MACHINES.glob("*.json"))
    parser.add_argument("--model", nargs="+", default=["6.7B"], choices=list(MODELS))
    parser.add_argument(
        "--machine", nargs="+", default=["nvlink8"], help=f"{', '.join(known)}, or a file like these"
    )
    parser.add_argument("--impl", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument("--strategy", nargs="+", default=["FULL_SHARD"], choices=STRATEGIES)
    parser.add_argument(
        "--sequence", type=int, nargs="+", default=[0], help="tokens of one sample (the model's own)"
    )
    parser.add_argument("--batch", type=int, default=1, help="samples per GPU")
    parser.add_argument(
        "--forward-prefetch", action="store_true", help="prefetch in forward (FSDP1 and fsdp_c)"
    )
    parser.add_argument("--ahead", type=int, default=1, metavar="N", help="units that fsdp_c prefetches (1)")
    parser.add_argument("--offload", action="store_true", help="CPU offload")
    parser.add_argument(
        "--recompute",
        default="",
        metavar="WHAT",
        help="recompute activations in backward: full, operators (all but attention and every other product), "
        "or N: of every Nth block",
    )
    parser.add_argument(
        "--adapters", action="store_true", help="train only adapters on all linear layers of the blocks"
    )
    parser.add_argument("--clip", action="store_true", help="clip gradients by their norm")
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="backwards before each step (1)"
    )
    parser.add_argument("--no-sync", action="store_true", help="reduce in the last of these backwards only")
    parser.add_argument("--reduce-in-bf16", action="store_true", help="reduce gradients in bf16, not in fp32")
    parser.add_argument(
        "--keep-last", action="store_true", help="FSDP2 does not reshard the last block after its forward"
    )
    parser.add_argument(
        "--standard",
        action="store_true",
        help="a fixed choice of rows, one line each, with the obstacle of fsdp_c",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="compare published measurements with the model (benchmarks/timeline/published.py)",
    )
    parser.add_argument("--free-host", action="store_true", help="set the host's costs to zero")
    parser.add_argument(
        "--most",
        type=int,
        default=0,
        metavar="N",
        help="print the N longest waits and largest blocks of memory",
    )
    parser.add_argument(
        "--picture", metavar="PNG", help="draw the streams of the last table's steps; needs matplotlib"
    )
    parser.add_argument(
        "--trace", metavar="JSON", help="write the last step of the last --impl for ui.perfetto.dev"
    )
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables here")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.standard or given.published:
        if given.standard:
            written = lines_of_standard()
        else:
            written = [report(compare(ROWS))]
            print(written[0])
        if given.markdown:
            Path(given.markdown).write_text("\n".join(written) + "\n")
        return
    written = []
    choices = itertools.product(given.machine, given.model, given.strategy, given.sequence)
    with ThreadPoolExecutor(2) as pool, tempfile.TemporaryDirectory() as folder:
        for machine, model, strategy, sequence in choices:
            rows = [
                Row(
                    name,
                    model,
                    machine,
                    strategy,
                    sequence,
                    **{option: vars(given)[option] for option in OPTIONS},
                )
                for name in (ALONE, *given.impl)
            ]
            spans = [f"{folder}/{row.implementation}" if given.picture else None for row in rows]
            traces = [given.trace if row is rows[-1] else None for row in rows]
            alone, *results = pool.map(in_a_process, rows, [given.most] * len(rows), traces, spans)
            written.append(table(results, alone))
            print(written[-1] + "\n", flush=True)
            for result in results if given.most else []:
                print(most_of(result) + "\n", flush=True)
            if given.picture:
                draw(
                    {row.implementation: str(path) for row, path in zip(rows[1:], spans[1:], strict=True)},
                    given.picture,
                )
    if given.markdown:
        Path(given.markdown).write_text("\n\n".join(written) + "\n")


if __name__ == "__main__":
    main()
