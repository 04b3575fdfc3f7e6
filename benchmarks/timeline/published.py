"""Published measurements of steps, compared with the model of time: python -m benchmarks.timeline
--published.

One number is fitted per machine, on the row that is marked: the speed of matrix products and attention. The
delay of late ranks is fitted on the rows of one model (``LATE_ON``) and is the same everywhere. All other
rows are predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.timeline.row import Result, Row, in_processes
from benchmarks.timeline.shapes import MODELS

TITAN = "pytorch/torchtitan b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_PR = "pytorch/torchtitan PR 165"
TITAN_A100 = "pytorch/torchtitan 0413364, docs/performance.md"
FOUNDRY = "mosaicml/llm-foundry 8c8dd48, scripts/train/benchmarking/README.md"
FMS = "pytorch.org/blog/maximizing-training, table 1"
# Operations per us of llm-foundry's attention, derived from the time per token at longer sequences: on 8
# GPUs, for 4,096 tokens and more, from rows of the same tables that are not listed below.
FOUNDRY_ATTENTION = {"ib512": 175e6, "a100_40": 96e6}
# Machines whose speed is fitted on another machine with the same GPU.
GPU_OF = {"h100_800g": "ib512", "a100_400g": "a100_80"}
BLOCKS = (3, 6)  # numbers of blocks simulated, to extrapolate to the whole model
LINEAR = ("step_ms", "plain_ms", "late_ms")  # linear in the number of blocks
# Speeds simulated to fit a machine's: a step has a part that scales with the speed and one that does not.
SPEEDS = (1.0, 0.8)


@dataclass(frozen=True)
class Measured:
    """A published measurement of a step."""

    source: str
    row: Row
    tokens_per_s: float  # per GPU
    reserved_GiB: float = 0.0  # 0: not published
    calibrates: bool = False  # the row on which its machine's speed is fitted

    @property
    def ms(self) -> float:
        sequence = self.row.sequence or MODELS[self.row.model].sequence
        return 1e3 * self.row.batch * sequence / self.tokens_per_s


def titan(implementation: str, model: str, machine: str, batch: int, recompute: str, ranks: int) -> Row:
    last = {"keep_last": implementation == "torch.fsdp2"}
    return Row(
        implementation, model, machine, batch=batch, recompute=recompute, ranks=ranks, clip=True, **last
    )


def foundry(model: str, batch: int, ranks: int, machine: str = "ib512", **others: Any) -> Row:
    """Return a row of llm-foundry. Its trainer, Composer, prefetches after the backward by default; its yamls
    clip gradients.
    """
    options = {
        "backward_prefetch": "BACKWARD_POST",
        "clip": True,
        "attention": FOUNDRY_ATTENTION[machine],
    } | others
    return Row("torch.fsdp1", model, machine, batch=batch, ranks=ranks, **options)


def fms(machine: str, ranks: int) -> Row:
    """Return a row of Llama 2 7B with norms and rotary positions in fp32, as in torchtitan, and gradients
    reduced in bf16.
    """
    options = {"sequence": 4096, "batch": 2, "clip": True, "reduce_in_bf16": True}
    return Row("torch.fsdp1", "titan-7b", machine, "HYBRID_SHARD", ranks=ranks, **options)  # type: ignore[arg-type]


def by_ranks(rates: dict[int, float], model: str, batch: int, **others: Any) -> list[Measured]:
    return [Measured(FOUNDRY, foundry(model, batch, ranks, **others), rate) for ranks, rate in rates.items()]


ROWS = [
    Measured(TITAN, titan("torch.fsdp2", "titan3-8b", "hbm2e", 2, "operators", 8), 5762, 82.4, True),
    Measured(TITAN, titan("torch.fsdp2", "titan3-8b", "hbm2e", 2, "operators", 128), 5605, 67.0),
    Measured(TITAN_PR, titan("torch.fsdp1", "titan-7b", "hbm2e", 8, "full", 8), 6150, 32.14),
    Measured(TITAN_PR, titan("torch.fsdp2", "titan-7b", "hbm2e", 8, "full", 8), 6200, 31.02),
    Measured(TITAN_PR, titan("torch.fsdp1", "titan-7b", "hbm2e", 8, "operators", 8), 6600, 63.90),
    Measured(TITAN_PR, titan("torch.fsdp2", "titan-7b", "hbm2e", 8, "operators", 8), 6700, 59.41),
    Measured(TITAN_A100, titan("torch.fsdp2", "titan-13b", "a100_80", 2, "", 64), 2162, calibrates=True),
    Measured(TITAN_A100, titan("torch.fsdp2", "titan-13b", "a100_80", 2, "operators", 64), 1904),
    Measured(TITAN_A100, titan("torch.fsdp2", "titan-13b", "a100_80", 2, "2", 64), 1914),
    Measured(TITAN_A100, titan("torch.fsdp2", "titan3-8b", "a100_80", 1, "operators", 64), 2973),
    Measured(TITAN_A100, titan("torch.fsdp2", "titan3-8b", "a100_80", 1, "2", 64), 2904),
    Measured(FOUNDRY, foundry("mpt-7b", 6, 8), 10643, calibrates=True),
    *by_ranks({128: 10475, 256: 10119, 512: 9670}, "mpt-7b", 6),
    *by_ranks({8: 4792, 16: 4767, 32: 4811, 64: 4800}, "mpt-13b", 2),
    *by_ranks({8: 45455}, "mpt-1b", 14),
    *by_ranks({16: 46037, 32: 45130, 64: 44402}, "mpt-1b", 20),
    *by_ranks({128: 44123, 256: 42555, 512: 39837}, "mpt-1b", 12, strategy="SHARD_GRAD_OP"),
    *by_ranks({128: 23422, 256: 22772, 512: 21664}, "mpt-3b", 8, strategy="SHARD_GRAD_OP"),
    *by_ranks({128: 5080, 256: 4989, 512: 4952}, "mpt-13b", 16, recompute="full"),
    *by_ranks({128: 2199, 256: 2148, 512: 2115}, "mpt-30b", 8, recompute="full"),
    *by_ranks({128: 1058, 256: 1035, 512: 1007}, "mpt-70b", 8, recompute="full"),
    Measured(
        FOUNDRY,
        foundry("mpt-7b", 16, 16, "a100_40", recompute="full", reduce_in_bf16=True),
        3645,
        calibrates=True,
    ),
    *by_ranks({128: 3623}, "mpt-7b", 18, machine="a100_40", recompute="full", reduce_in_bf16=True),
    *by_ranks({32: 9914, 128: 9538}, "mpt-3b", 6, machine="a100_40", reduce_in_bf16=True),
    Measured(FMS, fms("h100_800g", 96), 7500),
    Measured(FMS, fms("a100_400g", 128), 3700),
]
LATE_ON = "mpt-7b", "ib512"


@dataclass
class Beside:
    """A measured step and the model's prediction."""

    measured: Measured
    ms: float  # without late ranks
    result: Result
    late: float = 0.0  # fraction of the step added per rank

    @property
    def predicted_ms(self) -> float:
        return self.ms * (1 + self.late * self.measured.row.ranks)

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured.ms - 1

    @property
    def memory_error(self) -> float | None:
        given = self.measured.reserved_GiB
        return self.result.reserved_MiB / 2**10 / given - 1 if given else None

    @property
    def fitted_on(self) -> str:
        if self.measured.calibrates:
            return "speed"
        row = self.measured.row
        return "late" if (row.model, row.machine) == LATE_ON else ""


def speed_for(each: Measured, speeds: dict[str, float]) -> float:
    machine = each.row.machine
    return speeds[GPU_OF.get(machine, machine)]


def unscaled_ms(result: Result) -> float:
    return result.step_ms - result.late_ms


def speed_of(measured_ms: float, times: Sequence[float]) -> float:
    """Return the speed of a machine whose step took ``measured_ms``; ``times`` are the simulated ones at
    ``SPEEDS``.
    """
    (fast, slow), (full, less) = times, SPEEDS
    shortened = (slow - fast) / (1 / less - 1 / full)
    return shortened / (measured_ms - fast + shortened / full)


def lateness(points: Iterable[Beside]) -> float:
    """Return the fraction of a step that each rank adds, by least squares."""
    numbers = [(each.measured.row.ranks, each.measured.ms / each.ms - 1) for each in points]
    over = sum(ranks**2 for ranks, _ in numbers)
    return max(0.0, sum(ranks * more for ranks, more in numbers) / over) if over else 0.0


@dataclass
class Comparison:
    """All rows and the fitted numbers."""

    rows: list[Beside]
    speeds: dict[str, float]
    late: float

    @property
    def tested(self) -> list[Beside]:
        return [each for each in self.rows if not each.fitted_on]

    def signs(self) -> list[tuple[str, float, float]]:
        """Return (comparison, measured ratio, predicted ratio) of each pair of steps that differ in one
        choice.
        """
        found = []
        of = {each.measured.row: each for each in self.rows}
        for row, each in of.items():
            other = of.get(replace(row, implementation="torch.fsdp1", keep_last=False))
            if row.implementation == "torch.fsdp2" and other:
                found.append(("FSDP2 after FSDP1, " + name_of(row), each, other))
        for row, each in of.items():
            fewer = [of[key] for key in of if key == replace(row, ranks=key.ranks) and key.ranks < row.ranks]
            if fewer:
                least = min(fewer, key=lambda one: one.measured.row.ranks)
                what = f"{row.ranks} after {least.measured.row.ranks} GPUs, {name_of(row, False)}"
                found.append((what, each, least))
        return [
            (what, a.measured.ms / b.measured.ms - 1, a.predicted_ms / b.predicted_ms - 1)
            for what, a, b in found
        ]


def of_all_blocks(few: Result, more: Result) -> Result:
    """Extrapolate to the whole model from steps of few and of more blocks. Blocks are alike, so each adds the
    same.
    """
    part = (MODELS[more.row.model].blocks - few.row.blocks) / (more.row.blocks - few.row.blocks)
    values = {name: getattr(few, name) + part * (getattr(more, name) - getattr(few, name)) for name in LINEAR}
    return replace(more, row=replace(more.row, blocks=0), **values)


def results_of(rows: Sequence[tuple[Row, bool]]) -> Iterator[Result]:
    """Yield the result of each row, simulated with all blocks or extrapolated from a few."""
    jobs = [[row] if full else [replace(row, blocks=blocks) for blocks in BLOCKS] for row, full in rows]
    results = in_processes(list(itertools.chain(*jobs)))
    for job in jobs:
        few, *more = itertools.islice(results, len(job))
        yield of_all_blocks(few, *more) if more else few


def compare(rows: Sequence[Measured]) -> Comparison:
    fitted = [each for each in rows if each.calibrates]
    tried = results_of([(replace(each.row, speed=speed), False) for each in fitted for speed in SPEEDS])
    speeds = {}
    for each in fitted:
        speeds[each.row.machine] = speed_of(each.ms, [unscaled_ms(next(tried)) for _ in SPEEDS])
        print(f"{each.row.machine}: speed {speeds[each.row.machine]:.3f}", flush=True)
    # rows with memory run in full: with few blocks the peak may be at another point of the step
    results = results_of(
        [(replace(each.row, speed=speed_for(each, speeds)), each.reserved_GiB > 0) for each in rows]
    )
    found = []
    for each, result in zip(rows, results, strict=True):
        found.append(Beside(each, unscaled_ms(result), result))
        print(f"{name_of(each.row)}: {each.ms:.0f} ms measured, {found[-1].ms:.0f} predicted", flush=True)
    late = lateness(each for each in found if each.fitted_on == "late")
    for one in found:
        one.late = late
    return Comparison(found, speeds, late)


# ---- output


def name_of(row: Row, with_ranks: bool = True) -> str:
    parts = [row.implementation.replace("torch.fsdp", "FSDP"), row.model, row.machine]
    parts += [f"{row.ranks} GPUs"] * with_ranks + [row.strategy] * (row.strategy != "FULL_SHARD")
    parts.append(f"{row.batch} x {row.sequence or MODELS[row.model].sequence}")
    parts += [f"recompute {row.recompute}"] * bool(row.recompute)
    return ", ".join(parts)


def percent(part: float) -> str:
    return f"{100 * part:+.1f} %"


def spread(errors: Sequence[float]) -> str:
    return f"{100 * sum(errors) / len(errors):.1f} % off on average, {100 * max(errors):.1f} % at most"


def report(compared: Comparison) -> str:
    """Return the comparison as Markdown."""
    lines = ["| run | measured ms | plain | predicted | error | reserved GiB | predicted | error | fitted |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for each in compared.rows:
        given, error = each.measured.reserved_GiB, each.memory_error
        memory = ["", "", ""]
        if error is not None:
            memory = [f"{given:.1f}", f"{each.result.reserved_MiB / 2**10:.1f}", percent(error)]
        times = [f"{each.measured.ms:.0f}", f"{each.result.plain_ms:.0f}", f"{each.predicted_ms:.0f}"]
        cells = [name_of(each.measured.row), *times, percent(each.error), *memory, each.fitted_on]
        lines.append(f"| {' | '.join(cells)} |")
    errors = [abs(each.error) for each in compared.tested]
    of_memory = [abs(each.memory_error) for each in compared.rows if each.memory_error is not None]
    lines += ["", f"Time, of {len(errors)} rows that nothing was fitted on: {spread(errors)}."] * bool(errors)
    lines += [f"Reserved memory, of {len(of_memory)} rows: {spread(of_memory)}."] * bool(of_memory)
    speeds = ", ".join(f"{machine} {speed:.3f}" for machine, speed in compared.speeds.items())
    lines.append(f"Fitted: speeds {speeds}; each rank adds {1e6 * compared.late:.0f} millionths of a step.")
    lines += ["", "| a step is longer by | measured | predicted | sign |", "|---|---|---|---|"]
    for what, measured, predicted in compared.signs():
        sign = "right" if measured * predicted > 0 else "wrong"
        lines.append(f"| {what} | {percent(measured)} | {percent(predicted)} | {sign} |")
    return "\n".join(lines)
