"""The model of time, held to programs whose times are computed by hand.

Each program runs in a process that computes nothing and stands for 8 ranks, with costs of round numbers: the
device moves 1000 bytes and does 1000 floating-point operations in a us, 500 of attention, a gather takes 10 us and
one more for 100 bytes.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, output_of_python
from tests.simulated_gpu import timeline
from tests.simulated_gpu.timeline import COMPUTE, GATHER, SCATTER, Span, Step

PREPARATION = """
import json, torch, torch.distributed as dist
from tests.simulated_gpu import timeline
from tests.simulated_gpu.timeline import step

world_size = 8 if timeline.native().has_only_shapes() else 1
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=world_size)
timeline.host_is_free()
timeline.set_costs(memory=1000.0, flops_16=1000.0, flops_32=1000.0, product=0.0, attention=500.0)
timeline.set_costs(least=2.0, pcie=100.0)
timeline.set_wire(False, [(1.0, 10.01), (1e9, 10.0 + 1e7)])
timeline.set_wire(True, [(1.0, 1001.0), (1e9, 1000.0 + 1e9)])
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
large = torch.empty(25_000, device="cuda")  # 100 us to read, as much to write
small = torch.empty(8, device="cuda")       # 2 us, the least
part, whole = torch.empty(1_000, device="cuda"), torch.empty(8_000, device="cuda")
GATHER = 10 + 32_000 / 100
times = {}
"""


def run(program: str, settings: dict[str, str] | None = None) -> dict[str, Any]:
    """What the program leaves in ``times``."""
    code = (
        PREPARATION
        + textwrap.dedent(program)
        + "\nprint(json.dumps(times))\nimport os, sys\nsys.stdout.flush(); os._exit(0)"
    )
    said = output_of_python("-c", code, cwd=ROOT, **timeline.environment() | (settings or {}))
    return json.loads(said.strip().splitlines()[-1])


def test_kernels_take_what_their_bytes_and_their_operations_say() -> None:
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
        timeline.set_costs(product=7.0)
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


KERNELS_OF_CUDA = """
    import torchgen
    from pathlib import Path
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    known = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    by_name = {each.func.name: each for each in known.native_functions}
    for each in known.native_functions:
        of = by_name[each.structured_delegate] if each.structured_delegate else each
        if known.backend_indices[DispatchKey.CUDA].has_kernel(of):
            table = torch._C._dispatch_dump_table(f"aten::{each.func.name}").splitlines()
            rows = dict(row.split(": ", 1) for row in table if ": " in row)
            composite = "CompositeImplicitAutograd_" in rows["AutogradCUDA"] + rows["CUDA"]
            times[str(each.func.name)] = composite or "CompositeExplicitAutograd_" in rows["CUDA"]
"""


def test_what_cuda_has_a_kernel_of_is_not_composed() -> None:
    composed = run(KERNELS_OF_CUDA)
    assert len(composed) > 800
    assert [name for name, is_composed in composed.items() if is_composed] == []


def test_a_norm_and_a_gate_save_and_launch_what_they_do_on_cuda() -> None:
    """Their input and a number per row, but nothing between; the norm's backward is two kernels, which read all
    twice."""
    times = run("""
        norm = torch.nn.RMSNorm(50, device="cuda", dtype=torch.bfloat16)
        x = torch.empty(1_000, 50, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # 100 us
        def taken():
            return torch.cuda.memory_stats()["requested_bytes.all.current"]
        def kernels(body):
            with step() as s: body()
            return [[span.name, span.end - span.begin] for span in s.of(timeline.COMPUTE)]
        made = []
        for name, body in (("norm", norm), ("silu", torch.nn.functional.silu)):
            before = taken()
            times[name] = kernels(lambda: made.append(body(x)))
            times[f"{name} saves"] = taken() - before - x.nbytes
            times[f"{name}, backward"] = kernels(lambda: made[-1].backward(x.detach()))
            x.grad = None
    """)
    rstd = 1_000 * 4
    moved = 2 * (100_000 + 100_000 + rstd + 100) + 100_000 + 100  # what is read, twice, and written
    assert times == {
        "norm": [["aten::_fused_rms_norm", pytest.approx((2 * 100_000 + rstd + 100) / 1000)]],
        "norm saves": rstd,
        "norm, backward": [["aten::_fused_rms_norm_backward", pytest.approx(moved / 2 / 1000)]] * 2,
        "silu": [["aten::silu", pytest.approx(200)]],
        "silu saves": 0,
        "silu, backward": [["aten::silu_backward", pytest.approx(300)]],
    }


def test_kernels_over_lists_are_launched_by_tensors_and_by_chunks() -> None:
    """At most 2,240 chunks of 65,536 elements, and by how many lists there are at most 252 tensors of four."""
    times = run("""
        timeline.set_costs(op=5, launch=3)
        def launches(body):
            before = timeline.native().host_time()
            with step() as s: body()
            names = [span.name for span in s.spans if span.kind == timeline.COMPUTE]
            return len(names), sum(span.end - span.begin for span in s.spans if span.kind == timeline.COMPUTE)
        chunk = 65_536
        times["one"] = launches(lambda: torch._foreach_mul_([large, small], 2.0))
        many = [torch.empty(2, device="cuda") for _ in range(771)]
        times["of many tensors"] = launches(lambda: torch._foreach_mul_(many, 2.0))
        times["of two lists"] = launches(lambda: torch._foreach_add_(many, many))
        huge = torch.empty(2_240 * chunk + 1, device="cuda")
        times["of many chunks"] = launches(lambda: torch._foreach_mul_([huge], 2.0))
        def adamw(of):
            params = [torch.nn.Parameter(each) for each in of]
            optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
            for each in params: each.grad = torch.empty_like(each)
            optimizer.step()
            with step() as s: optimizer.step()
            return sum("fused_adamw" in span.name for span in s.spans)
        times["AdamW"] = adamw([huge])
        times["AdamW, of many tensors"] = adamw(many)
    """)
    huge = 2 * 4 * (2240 * 65536 + 1) / 1000
    assert times == {
        "one": [1, pytest.approx(2 * (100_000 + 32) / 1000)],
        "of many tensors": [2, pytest.approx(2 * 771 * 8 / 1000)],
        "of two lists": [2, pytest.approx(3 * 771 * 8 / 1000)],
        "of many chunks": [2, pytest.approx(huge)],
        "AdamW": 2,
        "AdamW, of many tensors": 4,
    }


def test_collectives_take_what_the_wire_says() -> None:
    times = run("""
        with step() as s: dist.all_gather_into_tensor(whole, part)
        times["gather"] = s.time - GATHER
        with step() as s: dist.reduce_scatter_tensor(part, whole)
        times["scatter"] = s.time - GATHER
        with step() as s: dist.all_reduce(whole)
        times["reduce"] = s.time - 2 * GATHER
        timeline.set_costs(gpus_per_node=4)
        with step() as s: dist.all_gather_into_tensor(whole, part)
        times["two nodes"] = s.time
        node = dist.new_group([0, 1, 2, 3])
        with step() as s: dist.all_gather_into_tensor(whole[:4000], part, group=node)
        times["a node"] = s.time
        across = dist.new_group([0, 4])
        with step() as s: dist.all_gather_into_tensor(whole[:2000], part, group=across)
        times["across"] = s.time
        timeline.set_wire(True, [(1.0, 51.0), (1e9, 50.0 + 1e9)], ranks=2)
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


def test_collectives_of_one_group_follow_each_other_and_those_of_two_do_not() -> None:
    times = run("""
        def twice(group):
            dist.all_gather_into_tensor(whole, part)
            with torch.cuda.stream(side): dist.all_gather_into_tensor(torch.empty_like(whole), part, group=group)
        with step() as s: twice(None)
        times["one group"] = s.time
        other = dist.new_group(list(range(8)))
        with step() as s: twice(other)
        times["two groups"] = s.time
    """)
    assert times == pytest.approx({"one group": 660, "two groups": 330})


def test_an_asynchronous_collective_is_waited_for_where_its_work_is() -> None:
    times = run("""
        with step() as s:
            work = dist.all_gather_into_tensor(whole, part, async_op=True)
            large.mul_(2)
            work.wait()
            large.mul_(2)
        times["time"] = s.time
    """)
    assert times == pytest.approx({"time": 330 + 200})


def test_a_slow_host_is_what_short_kernels_wait_for() -> None:
    times = run("""
        timeline.set_costs(op=5, event=1)
        with step() as s:
            for _ in range(3): small.mul_(2)
        times["three kernels"], times["late"] = s.time, s.host_bound
        with step() as s:
            large.mul_(2)                 # asked at 5, through at 205
            done = torch.cuda.Event()
            done.record()
            done.synchronize()            # the host is at 205
            small.mul_(2)                 # asked at 210
        times["the host waits"], times["late without the wait"] = s.time, s.host_bound
    """)
    assert times == pytest.approx(
        {
            "three kernels": 3 * 5 + 2,
            "late": 5 + 3 + 3,
            "the host waits": 5 + 200 + 5 + 2,
            "late without the wait": 10,
        }
    )


def test_an_fsdps_own_work_is_paid_at_its_collectives_and_not_by_operator() -> None:
    times = run("""
        timeline.set_costs(op=5, launch=1, collective=7, unit=300)
        before = timeline.native().host_time()
        with torch.profiler.record_function("FSDP::all_gather"):
            small.mul_(2)
            dist.all_gather_into_tensor(whole, part)
        times["its own"] = timeline.native().host_time() - before
        before = timeline.native().host_time()
        with torch.profiler.record_function("a model's"):
            small.mul_(2)
        times["a model's"] = timeline.native().host_time() - before
    """)
    assert times == pytest.approx({"its own": 1 + 1 + 100, "a model's": 5})


def test_a_recorded_block_comes_back_when_its_user_is_through_in_time() -> None:
    times = run("""
        def free_and_take(wait):
            block = torch.empty(25_000, device="cuda")
            at = block.data_ptr()
            with torch.cuda.stream(side):
                block.mul_(2)                # 200 us
                block.record_stream(side)
            del block
            if wait: side.synchronize()
            return float(torch.empty(25_000, device="cuda").data_ptr() == at)
        times["at once"] = free_and_take(False)
        torch.cuda.synchronize()
        times["later"] = free_and_take(True)
    """)
    assert times == {"at once": 0, "later": 1}


def test_memory_of_real_shapes_takes_no_bytes() -> None:
    times = run("""
        import resource
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        block = torch.zeros(2**27, device="cuda")
        model = torch.nn.Linear(8192, 8192, device="cuda")
        model(torch.ones(4096, 8192, device="cuda")).sum().backward()
        times["MiB"] = torch.cuda.max_memory_allocated() / 2**20
        times["of the process"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    """)
    # The block, the weight, the input, and the weight's gradient once the output is gone; biases are below
    # one.
    assert 512 + 256 + 128 + 256 <= times["MiB"] < 512 + 256 + 128 + 256 + 1
    assert times["of the process"] < 256


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


def test_a_run_of_shapes_alone_takes_the_time_of_one_that_computes() -> None:
    shapes, computed = (
        run(TRAINED),
        run(TRAINED, {"SIMULATED_GPU_SHAPES": "0", "SIMULATED_GPU_TIMELINE": "1"}),
    )
    assert len(shapes) > 20
    assert list(shapes) == list(computed)
    assert all(computed[name] == pytest.approx(shapes[name]) for name in shapes)


WHOLE_PARAMETERS = """
    import fsdp_c
    from fsdp_c.state import whole_parameters

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
    dtypes = {whole: torch.float32 for whole in optimizer._stepped}
    whole_parameters._agree_on_gradients = lambda *_: (dtypes, False)
    whole_parameters._raise_everywhere = lambda *_: None
    optimizer.step()
    with step() as s: optimizer.step()
    moves = [span.end - span.begin for span in s.spans if span.kind == timeline.OTHER_COLLECTIVE]
    times["time"], times["exposed"], times["moves"] = s.time, s.exposed, moves
"""


def test_the_next_bucket_of_whole_parameters_moves_beside_the_computation_of_this_one() -> None:
    times = run(WHOLE_PARAMETERS)
    moves = times["moves"]
    assert len(moves) == 2 * 4  # of four buckets, to the owners and back
    assert times["time"] > 4 * 2 * 200**3 / 1000
    assert times["exposed"] == pytest.approx(moves[0] + moves[-1])


ROWS = """
    import torch._meta_registrations
    from collections import Counter
    from benchmarks.model_shapes import MODELS, Model
    from benchmarks.timeline_models import build
    from benchmarks.timeline_row import Row, train

    machine = {"gpus_per_node": 8}
    tokens = torch.zeros(1, 8, dtype=torch.long, device="cuda")
    def built(implementation, shape=Model(64, 96, 4, 2, 8, 32), **settings):
        row = Row(implementation, "", "", **settings)
        return row, *build(row, shape, 8, machine)
    def spans(implementation, **settings):
        row, model, _ = built(implementation, **settings)
        trains = implementation != "alone"
        optimizer = torch.optim.AdamW(model.parameters(), fused=True) if trains else None
        for _ in range(2):
            with step() as s: train(row, model, optimizer, tokens)
        return s
"""


def test_what_is_recomputed_is_what_the_row_says() -> None:
    """Of two blocks with seven products each, and a head. The last product of a block has nothing behind it in
    the block, which is run again no further."""
    times = run(ROWS + """
    for what in ("", "full", "operators", "2"):
        names = Counter(span.name for span in spans("alone", recompute=what).spans)
        attention = names["aten::_scaled_dot_product_flash_attention"]
        times[what] = [names["aten::mm"], attention]
    """)  # fmt: skip
    products = 3 * (2 * 7 + 1)
    assert times == {
        "": [products, 2],
        "full": [products + 2 * 6, 4],
        "operators": [products + 2 * 3, 2],
        "2": [products + 6, 3],
    }


def test_an_experts_products_are_those_of_its_part_of_the_tokens() -> None:
    times = run(ROWS + """
    timeline.set_costs(least=0.0, memory=1e9)
    row, model, _ = built("alone", Model(64, 96, 4, 1, 8, 32, experts=4))
    with step() as s: model(tokens, tokens)
    times["us"] = [span.end - span.begin for span in s.spans if span.name == "aten::mm"]
    """)  # fmt: skip
    attention, router, head = [2 * 8 * 64 * 64 / 1000] * 4, 2 * 8 * 64 * 4 / 1000, 2 * 8 * 64 * 32 / 1000
    expert = [2 * 4 * 64 * 96 / 1000] * 3
    assert times["us"] == pytest.approx([*attention, router, *expert * 4, head])


def test_gathers_and_reductions_are_those_of_the_rows_options() -> None:
    """Of three units, of which the blocks' are gathered twice in each backward."""
    times = run(ROWS + """
    def counted(implementation, **settings):
        found = spans(implementation, **settings)
        kinds = (timeline.GATHER, timeline.SCATTER, timeline.OTHER_COLLECTIVE)
        return [len(found.of(kind)) for kind in kinds]
    times["plain"] = counted("fsdp_c")
    times["clipped"] = counted("fsdp_c", clip=True)
    times["two backwards"] = counted("fsdp_c", accumulate=2)
    times["without reductions"] = counted("fsdp_c", accumulate=2, no_sync=True)
    times["FSDP2"] = counted("torch.fsdp2")
    times["FSDP2, clipped"] = counted("torch.fsdp2", clip=True)
    times["FSDP2, last block kept"] = counted("torch.fsdp2", keep_last=True)
    times["FSDP2, without reductions"] = counted("torch.fsdp2", accumulate=2, no_sync=True)
    scatters = [spans("fsdp_c", reduce_in_bf16=is_half).of(timeline.SCATTER) for is_half in (False, True)]
    times["bytes"] = [sum(span.end - span.begin - 10 for span in each) for each in scatters]
    trained = spans("fsdp_c", adapters=True).of(timeline.SCATTER)
    times["of adapters"] = [len(trained), sum(100 * (span.end - span.begin - 10) for span in trained)]
    """)  # fmt: skip
    reductions, nbytes = times.pop("of adapters")
    numel = 8 * (4 * (64 + 64) + 3 * (64 + 96))  # of a block's: of rank 8, on all its layers
    assert reductions == 2
    assert nbytes == pytest.approx(2 * 4 * numel, rel=0.05)
    in_fp32, in_bf16 = times.pop("bytes")
    assert in_bf16 == pytest.approx(in_fp32 / 2, rel=0.01)
    assert times == {
        "plain": [5, 3, 0],
        "clipped": [5, 3, 1],
        "two backwards": [10, 6, 0],
        "without reductions": [10, 3, 0],
        "FSDP2": [6, 3, 0],
        "FSDP2, clipped": [6, 3, 1],
        "FSDP2, last block kept": [5, 3, 0],
        "FSDP2, without reductions": [12, 3, 0],
    }


def test_models_have_as_many_parameters_as_those_that_people_train() -> None:
    times = run(ROWS + """
    for name in ("llama2-7b", "llama2-13b", "llama3-8b", "mpt-7b"):
        times[name] = built("alone", MODELS[name])[2]
    """)  # fmt: skip
    assert times == {
        "llama2-7b": 6_738_415_616,
        "llama2-13b": 13_015_864_320,
        "llama3-8b": 8_030_261_248,
        # what is published has 64 words more, and no positions
        "mpt-7b": 6_649_286_656 + (8 - 64) * 4_096,
    }


def test_a_model_that_no_gpu_holds_is_made_as_it_is_sharded() -> None:
    times = run(ROWS + """
    import gc
    for name in ("torch.fsdp1", "torch.fsdp2", "fsdp_c"):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        _, model, parameters = built(name, MODELS["mixtral-8x7b"])
        times[name] = [parameters, torch.cuda.max_memory_allocated() / 2**30]
        del model
    """)  # fmt: skip
    shards = 46_702_792_704 * 4 / 8 / 2**30
    block = (46_702_792_704 - 2 * 32_000 * 4_096) / 32 * 4 / 2**30
    for parameters, peak in times.values():
        assert parameters == 46_702_792_704
        assert shards <= peak < shards + 3 * block


# ---- what is made of spans


def span(begin: float, end: float, stream: int = 0, kind: int = COMPUTE, **others: float) -> Span:
    fields = {"asked": 0.0, "ready": begin, "before": begin, "serial": 0, "cause": -1, "name": "mul"} | others
    return Span(begin=begin, end=end, stream=stream, kind=kind, **fields)  # type: ignore[arg-type]


def test_a_stall_names_what_was_waited_for() -> None:
    gather = span(0, 50, stream=3, kind=GATHER, serial=7, name="gather")  # type: ignore[arg-type]
    late = span(50, 60, ready=50, before=20, cause=7)
    assert Step(0, 60, [span(0, 20), gather, late]).stalls() == [(30, "mul", "gather on stream 3")]


def test_a_stall_is_of_what_a_kernel_beside_waited_for_and_not_of_what_is_left_out() -> None:
    scatter = span(10, 40, stream=4, kind=SCATTER, serial=8, name="scatter")  # type: ignore[arg-type]
    cast = span(40, 45, stream=5, serial=9, cause=8, before=0, name="cast")  # type: ignore[arg-type]
    last = span(45, 60, ready=45, before=10, cause=9, name="step")  # type: ignore[arg-type]
    taken = Step(0, 60, [span(0, 10), scatter, cast, last])
    assert taken.stalls() == [(35, "step", "scatter on stream 4")]
    assert taken.stalls(without=[scatter]) == [(5, "step", "scatter on stream 4")]


def test_a_stall_of_the_wire_is_the_time_between_collectives() -> None:
    first = span(0, 20, stream=3, kind=GATHER, name="gather")  # type: ignore[arg-type]
    kernel = span(0, 30, serial=5, name="mm")  # type: ignore[arg-type]
    second = span(30, 50, stream=4, kind=SCATTER, cause=5, before=0, name="scatter")  # type: ignore[arg-type]
    late = span(57, 60, stream=3, kind=GATHER, ready=20, before=20, name="gather")  # type: ignore[arg-type]
    assert Step(0, 60, [first, kernel, second, late]).wire_stalls() == [
        (10, "scatter", "mm on compute"),
        (7, "gather", "the host"),
    ]


def test_times_of_a_step_count_overlaps_once() -> None:
    spans = [span(0, 20), span(10, 40, 3, GATHER), span(30, 60, 4, GATHER), span(50, 70)]
    taken = Step(0, 80, spans)
    assert (taken.compute, taken.communication) == (40, 50)
    assert taken.idle == [(20, 50), (70, 80)]
    assert taken.exposed == 30


def test_a_trace_has_every_span_with_its_row(tmp_path: Path) -> None:
    Step(100, 180, [span(100, 120), span(110, 140, 3, GATHER)]).trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("mul", 0, 0, 20),
        ("mul", 3, 10, 30),
    ]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"compute", "stream 3"}
