"""The model of time, checked with programs whose times are computed by hand.

Each program runs in a process that computes nothing and represents 8 ranks. Costs are round numbers: the
device moves 1000 bytes per us and does 1000 floating-point operations per us, 500 of attention. An all-gather
takes 10 us, and 1 us more per 100 bytes.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest

from benchmarks.timeline import measure
from benchmarks.timeline.measure import COMPUTE, GATHER, Span, Step
from tests import simulated_gpu
from tests.processes import ROOT, output_of_python

pytestmark = pytest.mark.skipif(
    not simulated_gpu.is_on(), reason="needs the simulated GPU: python -m tests.simulated_gpu"
)

PREPARATION = """
import json, torch, torch.distributed as dist
from benchmarks.timeline import measure
from benchmarks.timeline.measure import step

world_size = 8 if measure.native().has_only_shapes() else 1
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=world_size)
measure.host_is_free()
measure.set_costs(memory=1000.0, flops_16=1000.0, flops_32=1000.0, product=0.0, attention=500.0)
measure.set_costs(least=2.0, pcie=100.0)
measure.set_wire(False, [(1.0, 10.01), (1e9, 10.0 + 1e7)])
measure.set_wire(True, [(1.0, 1001.0), (1e9, 1000.0 + 1e9)])
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
large = torch.empty(25_000, device="cuda")  # 100 us to read, as much to write
small = torch.empty(8, device="cuda")       # 2 us, the least
part, whole = torch.empty(1_000, device="cuda"), torch.empty(8_000, device="cuda")
GATHER = 10 + 32_000 / 100
times = {}
"""


def run(program: str, settings: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the program and return its dict ``times``."""
    code = (
        PREPARATION
        + textwrap.dedent(program)
        + "\nprint(json.dumps(times))\nimport os, sys\nsys.stdout.flush(); os._exit(0)"
    )
    said = output_of_python("-c", code, cwd=ROOT, **measure.environment() | (settings or {}))
    return json.loads(said.strip().splitlines()[-1])


def test_time_of_kernels_follows_from_bytes_and_operations() -> None:
    times = run("""
        with step() as s: small.mul_(2)
        times["the least"] = s.time
        with step() as s: large.mul_(2)
        times["read and written"] = s.time
        with step() as s: large.fill_(2)
        times["written"] = s.time
        with step() as s: other = large + large
        times["two read, one written"] = s.time
        with step() as s: large.view(5, -1).t()
        times["a view"] = s.time
        square = torch.empty(100, 100, device="cuda")
        with step() as s: square @ square
        times["a product"] = s.time
        with step() as s: large.to("cpu", non_blocking=True)
        times["to the host"] = s.time
        measure.set_costs(product=7.0)
        with step() as s: square @ square
        times["a product, with what each takes beside"] = s.time
        half = torch.empty(1, 2, 64, 32, device="cuda", dtype=torch.bfloat16)
        with step() as s: torch.ops.aten._scaled_dot_product_flash_attention(half, half, half, 0.0, True)
        times["causal attention"] = s.time
    """)
    assert times == {
        "the least": 2,
        "read and written": 200,
        "written": 100,
        "two read, one written": 300,
        "a view": 0,
        "a product": 2 * 100**3 / 1000,
        "to the host": 2 + 100_000 / 100,
        "a product, with what each takes beside": 7 + 2 * 100**3 / 1000,
        "causal attention": 4 * (2 * 64 * 64 * 32) / 2 / 500,
    }


def test_time_of_collectives_follows_from_the_wire() -> None:
    times = run("""
        with step() as s: dist.all_gather_into_tensor(whole, part)
        times["gather"] = s.time - GATHER
        with step() as s: dist.reduce_scatter_tensor(part, whole)
        times["scatter"] = s.time - GATHER
        with step() as s: dist.all_reduce(whole)
        times["reduce"] = s.time - 2 * GATHER
        measure.set_costs(gpus_per_node=4)
        with step() as s: dist.all_gather_into_tensor(whole, part)
        times["two nodes"] = s.time
        node = dist.new_group([0, 1, 2, 3])
        with step() as s: dist.all_gather_into_tensor(whole[:4000], part, group=node)
        times["a node"] = s.time
        across = dist.new_group([0, 4])
        with step() as s: dist.all_gather_into_tensor(whole[:2000], part, group=across)
        times["across"] = s.time
        measure.set_wire(True, [(1.0, 51.0), (1e9, 50.0 + 1e9)], ranks=2)
        with step() as s: dist.all_gather_into_tensor(whole[:2000], part, group=across)
        times["by a table for two ranks"] = s.time
    """)
    assert times == pytest.approx(
        {
            "gather": 0,
            "scatter": 0,
            "reduce": 0,
            "two nodes": 1000 + 32_000,
            "a node": 170,
            "across": 1000 + 8_000,
            "by a table for two ranks": 50 + 8_000,
        },
        abs=0.02,
    )


OVERLAP = """
    def program(where):
        with torch.cuda.stream(where):
            dist.all_gather_into_tensor(whole, part)
            gathered = torch.cuda.Event()
            gathered.record()
        large.mul_(2)
        main.wait_event(gathered)
        large.mul_(2)
    with step() as s: program({where})
    times["time"], times["exposed"], times["compute"] = s.time, s.exposed, s.compute
"""


def test_a_gather_beside_a_kernel_takes_the_longer_of_both() -> None:
    times = run(OVERLAP.replace("{where}", "side"))
    assert times == pytest.approx({"time": 330 + 200, "exposed": 330 - 200, "compute": 400})


def test_a_gather_on_the_stream_of_the_kernels_is_paid_in_full() -> None:
    times = run(OVERLAP.replace("{where}", "main"))
    assert times == pytest.approx({"time": 330 + 400, "exposed": 330, "compute": 400})


TRAINED = """
    import fsdp_c
    torch.manual_seed(0)
    group = dist.new_group([0])
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).cuda()
    model = fsdp_c.FullyShardedDataParallel(net, process_group=group, device_id=0, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.ones(32, 64, device="cuda")
    for _ in range(3):
        with step() as s:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    times = {f"{i}: {span.name}": [span.begin - s.begin, span.end - s.begin] for i, span in enumerate(s.spans)}
"""


def test_time_on_shapes_alone_equals_that_of_a_computing_run() -> None:
    shapes, computed = (
        run(TRAINED),
        run(TRAINED, {"SIMULATED_GPU_SHAPES": "0", "SIMULATED_GPU_TIMELINE": "1"}),
    )
    assert len(shapes) > 20
    assert list(shapes) == list(computed)
    assert all(computed[name] == pytest.approx(shapes[name]) for name in shapes)


WHOLE_PARAMETERS = """
    import fsdp_c
    from fsdp_c.optim import whole_parameters

    class Squares(torch.optim.SGD):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.sub_(param.grad @ param.grad.T)

    net = torch.nn.Sequential(*(torch.nn.Linear(200, 200, bias=False) for _ in range(32))).cuda()
    model = fsdp_c.FullyShardedDataParallel(net, device_id=0, use_orig_params=True)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    nbytes = 8 * 200 * 200 * 4  # a matrix for each rank
    optimizer = fsdp_c.optim.WholeParameters(model, Squares, lr=0.1, bucket_nbytes=nbytes)
    # what ranks tell each other has no values here
    whole_parameters._agree_on_gradients = lambda wholes, _: (wholes, False)
    whole_parameters._raise_everywhere = lambda *_: None
    optimizer.step()
    with step() as s: optimizer.step()
    moves = [span.end - span.begin for span in s.spans if span.kind == measure.OTHER_COLLECTIVE]
    times["time"], times["exposed"], times["moves"] = s.time, s.exposed, moves
"""


def test_transfers_of_whole_parameters_overlap_with_computation() -> None:
    times = run(WHOLE_PARAMETERS)
    moves = times["moves"]
    assert len(moves) == 2 * 4  # four buckets, each sent to its owner and back
    assert times["time"] > 4 * 2 * 200**3 / 1000
    assert times["exposed"] == pytest.approx(moves[0] + moves[-1])


def span(begin: float, end: float, stream: int = 0, kind: int = COMPUTE, **others: float) -> Span:
    fields = {"asked": 0.0, "ready": begin, "before": begin, "serial": 0, "cause": -1, "name": "mul"} | others
    return Span(begin=begin, end=end, stream=stream, kind=kind, **fields)  # type: ignore[arg-type]


def test_times_of_a_step_count_overlaps_once() -> None:
    spans = [span(0, 20), span(10, 40, 3, GATHER), span(30, 60, 4, GATHER), span(50, 70)]
    taken = Step(0, 80, spans)
    assert (taken.compute, taken.communication) == (40, 50)
    assert taken.idle == [(20, 50), (70, 80)]
    assert taken.exposed == 30
