"""One row of benchmarks.timeline: its options, its result, and the process in which it runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.timeline.shapes import MODELS

MACHINES = Path(__file__).resolve().parent / "machines"
IMPLEMENTATIONS = ("torch.fsdp1", "torch.fsdp2", "fsdp_c")
ALONE = "alone"  # the model unsharded, in bf16
UNIT_US = {"torch.fsdp1": 840.0, "torch.fsdp2": 1005.0, "fsdp_c": 50.0, ALONE: 0.0}
MOST_STALLS = 4
LARGEST_TABLE_BYTES = float(1 << 40)


@dataclass(frozen=True)
class Row:
    """The options of one simulated step."""

    implementation: str
    model: str
    machine: str
    strategy: str = "FULL_SHARD"
    sequence: int = 0  # 0: the model's default
    batch: int = 1
    forward_prefetch: bool = False
    free_host: bool = False
    backward_prefetch: str = "BACKWARD_PRE"
    offload: bool = False  # parameters, gradients and optimizer on the CPU
    ahead: int = 1  # units that fsdp_c prefetches
    adapters: bool = False  # train only adapters on the blocks' linear layers
    recompute: str = ""  # activations recomputed in backward: full, operators, or n for every nth block
    clip: bool = False  # clip gradients by their norm
    accumulate: int = 1  # forwards and backwards per optimizer step
    no_sync: bool = False  # reduce gradients in the last backward only
    reduce_in_bf16: bool = False
    keep_last: bool = False  # do not reshard the last block after its forward (FSDP2)
    ranks: int = 0  # 0: all ranks of the machine
    blocks: int = 0  # 0: the model's default
    speed: float = 0.0  # speed of products and attention; 0: the machine's
    attention: float = 0.0  # operations per us at any speed; 0: the machine's


@dataclass
class Result:
    """The result of a step, in ms and MiB. Computation, communication and numbers derived from them are
    without contention.
    """

    row: Row
    step_ms: float  # with contention and late ranks
    plain_ms: float  # without contention and late ranks
    late_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    host_ms: float
    slowed_ms: float  # time that contention adds to the computing stream's work
    optimizer_ms: float
    ends_ms: float  # the first all-gather and the last reduction
    requested_MiB: float
    allocated_MiB: float
    reserved_MiB: float
    between_MiB: float  # held between steps, once gradients are cleared
    parameters: int
    stalls: list[tuple[float, str, str]] = field(default_factory=list)  # stalls of the computing stream
    # stalls other than for the first all-gather and the last reduction
    avoidable: list[tuple[float, str, str]] = field(default_factory=list)
    of_wire: list[tuple[float, str, str]] = field(default_factory=list)
    # (bytes of a block, number of blocks, owner)
    at_peak: list[tuple[int, int, str]] = field(default_factory=list)
    # reserved and unused memory at the peak, in the same form
    idle: list[tuple[int, int, str]] = field(default_factory=list)


# ---- machines


def machine_path(name: str) -> Path:
    return Path(name) if name.endswith(".json") else MACHINES / f"{name}.json"


def machine_of(name: str) -> dict[str, Any]:
    return json.loads(machine_path(name).read_text())


def machine_of_row(row: Row) -> dict[str, Any]:
    given = {"world_size": row.ranks, "speed": row.speed, "attention": row.attention}
    return machine_of(row.machine) | {name: value for name, value in given.items() if value}


def us_by_nbytes(wire: dict[str, Any], ranks: int, nodes: int, per_node: int) -> list[tuple[float, float]]:
    """Return (bytes, us) of an all-gather, by its bytes in all, from the bus bandwidth as reported by
    nccl-tests.

    The bus bandwidth is bytes * (ranks - 1) / ranks / time. The bandwidth is given as a list by size, as a dict by
    number of nodes of ``per_node`` GPUs, to which NCCL's own latencies are added, or as one number, beside a
    latency.
    """
    share = (ranks - 1) / ranks
    bandwidth = wire["bus_GB_per_s"]
    if isinstance(bandwidth, list):
        return [(float(nbytes), nbytes * share / (1e3 * rate)) for nbytes, rate in bandwidth]
    if isinstance(bandwidth, dict):
        # A group's ring uses the fraction of a node's links that belongs to the group's GPUs in it.
        rate = at_nodes(bandwidth, nodes) * min(1.0, ranks / nodes / per_node)
        sizes = [1.0, *(float(1 << power) for power in range(16, 41))]
        return [(nbytes, us_of_ring(nbytes * share / (1e3 * rate), ranks, nodes)) for nbytes in sizes]
    return [(n, wire["latency_us"] + n * share / (1e3 * bandwidth)) for n in (1.0, LARGEST_TABLE_BYTES)]


# From NVIDIA/nccl, src/graph/tuning.cc, for the protocols LL128 and Simple: us of a ring, us per hop within a
# node and between nodes, and the fraction of the bandwidth that is reached.
PROTOCOLS = ((10.0, 1.9, 4.0, 0.92), (8.4, 3.4, 9.6, 1.0))


def us_of_ring(us_of_bytes: float, ranks: int, nodes: int) -> float:
    """Return the time of a ring by the faster protocol."""
    return min(
        base + (ranks - nodes) * within + (nodes - 1) * between + us_of_bytes / part
        for base, within, between, part in PROTOCOLS
    )


def at_nodes(bandwidth: dict[str, float], nodes: int) -> float:
    """Interpolate linearly in the logarithm of the number of nodes; outside of the table use the nearest
    entry.
    """
    known = sorted((int(number), rate) for number, rate in bandwidth.items())
    nodes = min(max(nodes, known[0][0]), known[-1][0])
    fewer, fast = max(each for each in known if each[0] <= nodes)
    more, slow = min(each for each in known if each[0] >= nodes)
    return fast if fewer == more else fast + (slow - fast) * math.log(nodes / fewer, more / fewer)


def set_machine(machine: dict[str, Any]) -> None:
    """Configure the simulated GPU as a machine. Runs in a process of the simulated GPU."""
    from benchmarks.timeline import measure

    world_size, per_node = machine["world_size"], machine["gpus_per_node"]
    measure.set_costs(gpus_per_node=per_node, **machine["gpu"])
    for name in ("flops_16", "attention"):
        measure.set_costs(**{name: measure.native().cost(name) * machine.get("speed", 1.0)})
    if "attention" in machine:
        measure.set_costs(attention=machine["attention"])
    within, between = machine["within_node"], machine.get("between_nodes")
    of_node = us_by_nbytes(within, min(per_node, world_size), 1, per_node)
    measure.set_wire(False, of_node, multiprocessors=within.get("multiprocessors", 0.0))
    if between:
        nodes = math.ceil(world_size / per_node)
        # one table for all groups, and one for groups of one GPU per node, over which replicas reduce
        for key, ranks in ((0, world_size), (nodes, nodes)):
            times = us_by_nbytes(between, ranks, nodes, per_node)
            measure.set_wire(True, times, key, between.get("multiprocessors", 0.0))


# ---- simulation of one row


def run_row(row: Row, most: int, trace: str | None, spans: str | None) -> Result:
    """Simulate one row. Runs in a process of the simulated GPU."""
    import torch
    import torch._meta_registrations  # shapes of operators registered in Python only
    import torch.distributed as dist

    from benchmarks.timeline import measure, stalls
    from benchmarks.timeline.contention import contended
    from benchmarks.timeline.models import build

    torch.set_num_threads(1)
    machine, shape = machine_of_row(row), MODELS[row.model]
    shape = replace(shape, blocks=row.blocks or shape.blocks)
    sequence = row.sequence or shape.sequence
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=machine["world_size"])
    set_machine(machine)
    measure.set_costs(unit=UNIT_US[row.implementation])
    if row.free_host:
        measure.host_is_free()
    model, parameters = build(row, shape, sequence, machine)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) if row.implementation != ALONE else None
    )
    tokens = torch.zeros(row.batch, sequence, dtype=torch.long, device="cuda")
    for number in range(4):
        if number == 1:
            torch.cuda.empty_cache()  # free the memory that only the first step uses
        if number == 3:
            torch.cuda.reset_peak_memory_stats()
        with measure.step() as taken, measure.memory() as memory:
            train(row, model, optimizer, tokens)
    shared = contended(taken)
    if trace:
        stalls.trace(shared, trace)
    if spans:
        import pickle

        Path(spans).write_bytes(pickle.dumps(shared))
    late = machine.get("late", 0.0) * machine["world_size"] * shared.time
    return result_of(row, taken, shared, late, memory, parameters, most)


def train(row: Row, model: Any, optimizer: Any, tokens: Any) -> None:
    from benchmarks.common import without_reduction

    for number in range(row.accumulate):
        waits = row.no_sync and row.implementation != ALONE and number < row.accumulate - 1
        with without_reduction(row.implementation, model) if waits else nullcontext():
            model(tokens, tokens).backward()
    if row.clip and row.implementation == "torch.fsdp2":
        import torch

        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif row.clip and row.implementation != ALONE:
        model.clip_grad_norm_(1.0)
    if optimizer is None:
        for parameter in model.parameters():
            parameter.grad = None
    else:
        optimizer.step()
        optimizer.zero_grad()


def largest(counted: Counter[Any]) -> list[tuple[int, int, str]]:
    """Sort blocks by their bytes in all, largest first."""
    blocks = [
        (block.nbytes, count, f"stream {block.stream}" + (", a pool" if block.in_pool else ""))
        for block, count in counted.items()
    ]
    return sorted(blocks, key=lambda each: -each[0] * each[1])


def peaks_MiB() -> tuple[float, float, float]:
    """Return the peaks of requested, allocated and reserved memory."""
    import torch

    requested = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return requested / 2**20, allocated / 2**20, reserved / 2**20


def result_of(
    row: Row, taken: Any, shared: Any, late: float, memory: Any, parameters: int, most: int
) -> Result:
    """Return the result of a step from its spans without contention (``taken``) and with it (``shared``)."""
    import torch

    from benchmarks.timeline import measure, stalls

    gathers, scatters = taken.of(measure.GATHER), taken.of(measure.SCATTER)
    first_and_last = [*gathers[:1], *scatters[-1:]]
    ends = sum(span.end - span.begin for span in first_and_last)
    optimizer = sum(span.end - span.begin for span in taken.main if "fused_adam" in span.name)
    # spans of the same serials in the step with contention
    serials = {span.serial for span in first_and_last}
    left_out = [span for span in shared.spans if span.serial in serials]
    return Result(
        row,
        (shared.time + late) / 1e3,
        taken.time / 1e3,
        late / 1e3,
        taken.compute / 1e3,
        taken.communication / 1e3,
        shared.exposed / 1e3,
        shared.host_bound / 1e3,
        (shared.compute - taken.compute) / 1e3,
        optimizer / 1e3,
        ends / 1e3,
        *peaks_MiB(),
        torch.cuda.memory_allocated() / 2**20,
        parameters,
        stalls.stalls(shared)[:most],
        stalls.stalls(shared, without=left_out)[:MOST_STALLS],
        stalls.wire_stalls(shared)[:MOST_STALLS],
        largest(memory.at_peak)[:most],
        largest(memory.idle_at_peak)[:most],
    )


def memory_of(row: Row) -> dict[str, str]:
    """Return the memory of the simulated device as an environment variable."""
    gib = 1024 if row.implementation == ALONE else machine_of(row.machine).get("memory_GiB", 80)
    return {"SIMULATED_GPU_MEMORY": str(int(gib * 2**30))}


def in_a_process(row: Row, most: int = 0, trace: str | None = None, spans: str | None = None) -> Result:
    """Simulate a row in a new process and return its result."""
    from benchmarks.timeline import measure

    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.timeline.row"]
    command.append(json.dumps({"row": vars(row), "most": most, "trace": trace, "spans": spans}))
    environment = os.environ | measure.environment() | memory_of(row)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{row} failed:\n{done.stderr[-3000:]}")
    fields = json.loads(lines[-1])
    lists = {
        name: [tuple(each) for each in value] for name, value in fields.items() if isinstance(value, list)
    }
    return Result(**fields | {"row": row} | lists)


def in_processes(rows: Sequence[Row], workers: int = 2) -> Iterator[Result]:
    """Yield the results in the order of the rows. Each runs in its own process."""
    with ThreadPoolExecutor(workers) as threads:
        yield from threads.map(in_a_process, rows)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    result = run_row(Row(**given.pop("row")), **given)
    print(json.dumps(vars(result) | {"row": None}), flush=True)
    os._exit(0)  # a normal exit could wait for threads of autograd
