"""Memory of a training step under torch's allocator: fsdp_c, torch's FSDP1 and FSDP2."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.timeline import measure
from benchmarks.timeline.row import IMPLEMENTATIONS, Row, in_a_process
from tests.processes import ROOT, output_of_python

SHAPES: dict[str, dict[str, Any]] = {
    "most at the end of the backward": {"machine": "nvlink8", "sequence": 256},
    "most at its begin": {"machine": "nvlink8", "sequence": 1024},
    "most of it activations": {"machine": "ib512", "sequence": 4096, "batch": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_requests_no_more_memory_than_torchs(shape: str) -> None:
    """Requested bytes are compared. Allocated bytes are slightly larger, as the allocator does not split off
    less than 1 MiB of a larger block. At the end of a backward FSDP2 frees the root's gradients before it
    allocates their reduced shard; FSDP1 and fsdp_c hold both.
    """
    fsdp1, fsdp2, ours = (in_a_process(Row(name, "0.4B", **SHAPES[shape])) for name in IMPLEMENTATIONS)
    is_end = shape == "most at the end of the backward"
    shard = 2 * 32000 * 1024 * 4 / 8 / 2**20 if is_end else 0.0
    assert ours.requested_MiB <= min(fsdp1.requested_MiB, fsdp2.requested_MiB + shard)
    assert ours.between_MiB <= min(fsdp1.between_MiB, fsdp2.between_MiB)
    assert ours.reserved_MiB <= min(fsdp1.reserved_MiB, fsdp2.reserved_MiB)


def test_prefetching_two_units_holds_one_more_and_hides_more_communication() -> None:
    one, two = (in_a_process(Row("fsdp_c", "1.3B", "ethernet64", ahead=ahead)) for ahead in (1, 2))
    block = 2 * (4 * 2048 * 2048 + 3 * 2048 * 5504 + 2 * 2048) / 2**20  # one block in bf16
    assert two.requested_MiB - one.requested_MiB == pytest.approx(block, abs=1)
    assert two.step_ms < 0.998 * one.step_ms


PARTS = """
import torch, torch._meta_registrations, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from fsdp_c import FullyShardedDataParallel as FSDP
from benchmarks.timeline.measure import Block, memory, nbytes_of

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=8)
with torch.device("cuda"):
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
mixed = MixedPrecision(torch.bfloat16, torch.float32)
def wrap(module):
    return FSDP(module, device_id=0, use_orig_params=True, mixed_precision=mixed)
model = wrap(nn.Sequential(*map(wrap, net)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.empty(16, 1024, device="cuda")
def forward_backward():
    model(batch).sum().backward()
def gathered(blocks):
    return [block for block in blocks if block.in_pool]
def changes_in_a_step():
    with memory() as taken:
        forward_backward()
    return taken.changes
full = 4 * (1024 * 1024 + 1024)
def inputs():
    changes = changes_in_a_step()
    return [(block.stream, block.in_pool) for _, block, is_taken in changes if is_taken and block.nbytes >= full]
for _ in range(2):
    forward_backward()
    optimizer.step()
    optimizer.zero_grad()
sharded = sum(unit.sharded_nbytes for unit in __import__("fsdp_c").summary(model).units)
start = torch.cuda.memory_allocated()
"""


def run(program: str, **variables: str) -> None:
    code = PARTS + program + "\nimport os, sys\nsys.stdout.flush(); os._exit(0)"
    output_of_python("-c", code, cwd=ROOT, timeout_s=1800, **measure.environment() | variables)


def test_unsharded_parameters_of_steps_share_one_segment() -> None:
    """Four layers of just over 2 MiB, two unsharded at a time, need the smallest segment that the allocator
    has.
    """
    run("""
torch.cuda.empty_cache()
with memory() as taken:
    forward_backward()
blocks = {block.nbytes for _, block, _ in taken.changes if block.in_pool}
full = 1024 * 1024 + 1024
assert blocks == {2 * full, 4 * full}, blocks  # the last reduction's too
assert [block.nbytes for block in taken.segments.values() if block.in_pool] == [20 * 2**20]
""")


def test_parameters_unsharded_outside_of_steps_use_no_pool() -> None:
    """Full parameters in fp32 are allocated on the script's stream. The pool belongs to a different stream
    and has no room.
    """
    run("""
torch.cuda.empty_cache()
before = torch.cuda.memory_reserved()
with FSDP.summon_full_params(model):
    inside = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == before, (before, torch.cuda.memory_reserved())
assert inside > before, (before, inside)
""")


def test_cached_memory_is_freed_for_the_pool_of_steps() -> None:
    """Cached memory fills the device before the first step, so that there is no other place for the arena
    block.
    """
    run("""
model, batch = wrap(nn.Linear(4096, 4096, device="cuda")), torch.empty(16, 4096, device="cuda")
torch.empty(2**30, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_reserved() > 2**30
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
with memory() as taken:
    forward_backward()
largest = max(block.nbytes for block in taken.segments.values() if block.in_pool)
assert largest >= 4 * (4096 * 4096 + 4096), largest  # what the last reduction reads as well
""")


@pytest.mark.parametrize("conf", ["", "max_split_size_mb:21"])
def test_unsplittable_segments_are_freed_by_empty_cache(conf: str) -> None:
    """If the allocator cannot split the segment, unsharded parameters get their own segments, and
    empty_cache() leaves no idle memory.
    """
    program = """
full = 2 * (4096 * 4096 + 4096)
net = [nn.Linear(4096, 4096, bias=True, device="cuda") for _ in range(3)]
model, batch = wrap(nn.Sequential(*map(wrap, net))), torch.empty(16, 4096, device="cuda")
forward_backward()
torch.cuda.empty_cache()
with memory() as taken:
    forward_backward()
segments = sorted(block.nbytes for block in taken.segments.values() if block.in_pool and block.nbytes > full)
assert segments == ([34 * 2**20] * 2 if "CONF" else [66 * 2**20]), segments
"""
    run(program.replace("CONF", conf), PYTORCH_CUDA_ALLOC_CONF=conf)


def test_last_reduction_reads_idle_memory_of_the_pool() -> None:
    """The first of four layers, in bf16 with reduction in fp32, is reduced last. Its input fits into the room
    of two unsharded layers.
    """
    run("""
*others, last = inputs()
gathers = {block.stream for _, block, _ in changes_in_a_step() if block.in_pool}
assert last == (*gathers, True), last
assert len(others) == 3 and not any(in_pool or stream == 0 for stream, in_pool in others), others
""")


@pytest.mark.parametrize("is_full", [False, True])
def test_pool_has_room_for_the_roots_reduction_unless_it_is_full(is_full: bool) -> None:
    """For a single layer in bf16, the input of the reduction in fp32 is twice as large as the unsharded
    parameters. A first forward without gradients does not reserve room for a reduction, which then reads memory
    of the compute stream.
    """
    program = """
torch.cuda.empty_cache()
model = wrap(nn.Linear(1024, 1024, device="cuda"))
if IS_FULL:
    with torch.no_grad():
        model(batch)
forward_backward()
(found,) = inputs()
assert found == (0, False) if IS_FULL else found[1], found
"""
    run(program.replace("IS_FULL", str(is_full)))


def test_gradients_reduced_in_another_dtype_belong_to_the_compute_stream() -> None:
    """The reduction stream's memory is for packed gradients. Gradients allocated there would fragment it."""
    run("""
mixed = MixedPrecision(torch.bfloat16)
model = wrap(nn.Sequential(*(wrap(nn.Linear(1024, 1024, device="cuda")) for _ in range(4))))
shard = 4 * (1024 * 1024 + 1024) // 8
streams = [block.stream for _, block, is_taken in changes_in_a_step() if is_taken and block.nbytes == shard]
assert len(streams) >= 4 and not any(streams), streams
""")


def test_zero_grad_frees_gradients_and_no_unsharded_memory_remains() -> None:
    run("""
with memory() as taken:
    forward_backward()
assert gathered(taken.at_peak) and not gathered(taken.in_use)
assert torch.cuda.memory_allocated() == start + sharded
optimizer.step()
assert torch.cuda.memory_allocated() == start + sharded
optimizer.zero_grad()
assert torch.cuda.memory_allocated() == start
""")


def test_one_remaining_gradient_keeps_its_units_memory() -> None:
    run("""
for order in (1, -1):
    forward_backward()
    params = [param for param in model.parameters() if param.grad is not None][::order]
    for param in params[:-1]:
        param.grad = None
    assert torch.cuda.memory_allocated() - start == sharded // 4
    params[-1].grad = None
    assert torch.cuda.memory_allocated() == start
""")
