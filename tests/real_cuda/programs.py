"""Programs of ranks on torch's CUDA build, and their launcher. Each rank is a new process, as settings are
read once per process.

``python -m tests.real_cuda.programs NAME`` runs one rank.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp1
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
from tests.settings import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SLOW, FAILS, HANGS = 1, 2, 3  # constants of device/nccl.cpp


def disturb(what: int, calls_until: int = 0, ms: int = 0) -> None:
    """Disturb a call of this process to NCCL, the first one after ``calls_until`` calls."""
    ctypes.CDLL(str(Path(os.environ["FAKE_CUDA"]) / "libnccl.so.2")).fake_nccl_disturb(what, calls_until, ms)


def run(name: str, world_size: int = 2, timeout_s: float = 300.0, **settings: str) -> list[tuple[int, str]]:
    """Return (exit status, output) of each rank. Asserts that all ranks end in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world_size):
        variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {key: str(value) for key, value in variables.items()} | settings
        command = [sys.executable, "-m", "tests.real_cuda.programs", name]
        processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    deadline = time.monotonic() + timeout_s * PATIENCE
    try:
        said = [one.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for one in processes]
    finally:
        for one in processes:
            one.kill()
    return [(one.returncode, text) for one, text in zip(processes, said, strict=True)]


# ---- helpers of a rank


def start(**options: Any) -> int:
    """Join an NCCL group on this rank's own device and return the rank."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    if os.environ.get("EAGER"):
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group("nccl", **options)
    return rank


def small_model(library: Any, **options: Any) -> Any:
    """Return a model of four units."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.LayerNorm(24)) for _ in range(3)]
    return library.FullyShardedDataParallel(
        nn.Sequential(*layers, nn.Linear(24, 5)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=torch.cuda.current_device(),
        **options,
    )


def trained(library: Any, steps: int = 3, **options: Any) -> list[Any]:
    """Return the losses and full parameters of a small model after ``steps`` steps."""
    rank = int(os.environ["RANK"])
    model = small_model(library, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    out: list[Any] = []
    for step in range(steps):
        with torch.autocast("cuda", enabled=False):
            accumulates = model.no_sync() if step == 1 else torch.enable_grad()
            with accumulates:
                loss = model(torch.randn(6, 24, device="cuda")).square().mean()
                loss.backward()
        out.append(loss.detach())
        if step != 1:
            out.append(model.clip_grad_norm_(1.0))
            optimizer.step()
            optimizer.zero_grad()
    with library.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        out += [param.detach().clone() for param in model.parameters()]
    return out


def four_settings() -> list[dict[str, Any]]:
    half = fsdp1.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return [
        {},
        {"use_orig_params": True, "forward_prefetch": True},
        {"sharding_strategy": fsdp1.ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": half},
        {"cpu_offload": fsdp1.CPUOffload(offload_params=True)},
    ]


def both() -> None:
    """Compare FSDP1 and fsdp_c bit for bit in several settings."""
    start()
    settings = four_settings()
    if os.environ.get("HYBRID"):
        hybrid = fsdp1.ShardingStrategy.HYBRID_SHARD, fsdp1.ShardingStrategy._HYBRID_SHARD_ZERO2
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        groups = mesh.get_group("shard"), mesh.get_group("replicate")
        settings = [{"sharding_strategy": each, "process_group": groups} for each in hybrid]
        settings += [{"sharding_strategy": each, "device_mesh": mesh} for each in hybrid]
    count = 0
    for options in settings:
        theirs = trained(fsdp1, **options)
        ours = trained(fsdp_c, **options)
        assert len(ours) == len(theirs) > 5
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), options
        count += 1
    torch.cuda.synchronize()
    world: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    splits = world.comm_split_count()
    dist.destroy_process_group()
    print(f"equal: {count}, split: {splits}", flush=True)


def step(model: Any, batch: Any) -> list[Any]:
    """Return the loss and this rank's gradients, and clear the gradients."""
    loss = model(batch).float().square().mean()
    loss.backward()
    out = [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]
    model.zero_grad()
    return out


def same(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def used_nbytes() -> int:
    """Return the used bytes of the device after synchronization."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def is_named(error: RuntimeError, rank: int) -> bool:
    """Return True if torch's error keeps its beginning and also names rank, step, unit and remedy."""
    said = rf"CUDA [\s\S]*\nrank {rank}, step \d+: memory ran out while this rank waits in the .* of .*\. Smaller"
    return re.match(said, str(error)) is not None


def no_memory() -> None:
    """Let allocations of a step fail one by one. The error is annotated, no memory leaks, and the next step
    is unchanged.
    """
    driver = ctypes.CDLL(str(Path(os.environ["FAKE_CUDA"]) / "libcuda.so.1"))
    driver.fake_cuda_refuse.argtypes, driver.fake_cuda_refuse.restype = [ctypes.c_long], ctypes.c_long
    rank = start()
    for options in four_settings():
        model = small_model(fsdp_c, **options)
        batch = torch.randn(6, 24, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))
        for _ in range(2):
            expected = step(model, batch)
        model(batch)  # no backward: a unit cannot notice an exception between forward and backward
        between = used_nbytes()
        step(model, batch)
        before = used_nbytes()
        driver.fake_cuda_refuse(-1)
        assert same(step(model, batch), expected)
        assert used_nbytes() == before, (options, used_nbytes() - before)
        count = torch.tensor(driver.fake_cuda_refuse(-1), device="cuda")
        # a rank without elements of some parameter copies fewer gradients
        dist.all_reduce(count, dist.ReduceOp.MIN)
        numbers, said, named = range(0, int(count), int(os.environ["EVERY"])), 0, 0
        del count
        for number in numbers:
            driver.fake_cuda_refuse(number)
            try:
                step(model, batch)
            except RuntimeError as error:
                assert "out of memory" in str(error), error
                said += 1
                named += is_named(error, rank)
            driver.fake_cuda_refuse(-1)
            model.zero_grad()
            assert used_nbytes() <= between, (options, number, used_nbytes() - between)
            assert same(step(model, batch), expected), (options, number)
            assert used_nbytes() == before, (options, number)
        assert said > len(numbers) / 2
        print(f"{said} of {len(numbers)} raised, {named} of a unit", flush=True)
    os._exit(0)


def one_goes_wrong() -> None:
    """Let a collective of rank 1 hang or fail in the second step. Rank 0 waits for rank 1."""
    rank = start(timeout=timedelta(seconds=20))
    trained(fsdp_c, steps=1)
    torch.cuda.synchronize()
    print("one step", flush=True)
    if rank == 1:
        disturb(int(os.environ["DISTURB"]), calls_until=5)
    trained(fsdp_c, steps=3)
    torch.cuda.synchronize()
    print("all steps", flush=True)


def one_aborts() -> None:
    """Abort rank 1's communicators between a forward and its backward. Rank 0 waits for rank 1."""
    rank = start(timeout=timedelta(seconds=20))
    model = small_model(fsdp_c)
    loss = model(torch.randn(6, 24, device="cuda")).square().mean()
    torch.cuda.synchronize()
    print("one step", flush=True)
    if rank == 1:
        dist.distributed_c10d._abort_process_group()
    loss.backward()
    torch.cuda.synchronize()
    print("all steps", flush=True)


def ends_inside_work() -> None:
    """Destroy the group while slow collectives of a step are pending."""
    start()
    model = small_model(fsdp_c)
    for _ in range(2):
        model(torch.randn(6, 24, device="cuda")).square().mean().backward()
    disturb(SLOW, ms=100)
    model(torch.randn(6, 24, device="cuda")).square().mean().backward()
    dist.destroy_process_group()
    del model
    print("destroyed", flush=True)


if __name__ == "__main__":
    programs = (both, no_memory, one_goes_wrong, one_aborts, ends_inside_work)
    {one.__name__: one for one in programs}[sys.argv[1]]()
