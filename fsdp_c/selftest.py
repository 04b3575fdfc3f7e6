"""python -m fsdp_c selftest: does fsdp_c keep its promises on this machine? Values, memory and time beside
torch's.

Its parts stand in the order in which things fail first: loading, kernels, streams, one rank, all ranks,
hybrid groups, graphs, files.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c import _C, checkpoint
from fsdp_c.api import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_c.compat import upstream
from fsdp_c.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_c.sharding.construction import groups_of_nodes
from fsdp_c.tools import environment
from fsdp_c.wrap import ModuleWrapPolicy

STEPS = 20
WARM_UP = 5
OPS = torch.ops.fsdp_c
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HYBRID = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def main(device: str | None, width: int) -> int:
    """On the ranks of torchrun, or on as many as this machine has devices for. 0 if all is well, else 1."""
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if accelerator is None else accelerator.type
    if "RANK" not in os.environ:
        count = 2 if device == "cpu" else torch.get_device_module(device).device_count()
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {count}"
        own = f"-m fsdp_c selftest --device {device} --width {width}"
        command = [sys.executable, *torchrun.split(), *own.split()]
        return subprocess.run(command, check=False).returncode
    here = torch.device("cpu")
    if device != "cpu":
        module = torch.get_device_module(device)
        here = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")) % module.device_count())
        module.set_device(here)
    dist.init_process_group(
        f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}" if device != "cpu" else "gloo"
    )
    try:
        return _Report(here, width).run()
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """Odd sizes, a bias, a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Case(NamedTuple):
    """A configuration: arguments of both implementations, and how the script trains."""

    arguments: dict[str, Any]
    accumulates: bool = False
    clips: bool = False


CASES = {
    "FULL_SHARD": Case({}),
    "SHARD_GRAD_OP, original parameters": Case(
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True}
    ),
    "NO_SHARD": Case({"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "bfloat16": Case({"mixed_precision": BF16}),
    "bfloat16, original parameters, prefetched": Case(
        {
            "mixed_precision": BF16,
            "use_orig_params": True,
            "forward_prefetch": True,
            "limit_all_gathers": False,
        }
    ),
    "accumulated under no_sync, clipped": Case({"use_orig_params": True}, accumulates=True, clips=True),
    "CPU offload": Case({"cpu_offload": CPUOffload(offload_params=True)}),
}


class _Report:
    """Runs the parts, and keeps what they say. All ranks run each, which fails where it failed on one."""

    def __init__(self, device: torch.device, width: int) -> None:
        self.device, self.width = device, width
        self.lines: list[str] = []
        self.failed: list[str] = []

    def run(self) -> int:
        started = time.perf_counter()
        self._say(environment.report())
        self._say(f"{dist.get_world_size()} ranks on {self.device.type}")
        self._part("kernels", lambda: _kernels(self.device))
        if self.device.type != "cpu":
            self._part("streams", lambda: _streams(self.device))
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        self._part("one rank", lambda: self._case(Case({"process_group": alone})))
        for name, case in CASES.items():
            if dist.get_world_size() > 1:
                self._part(name, lambda case=case: self._case(case))  # type: ignore[misc]
        if (ranks := dist.get_world_size()) >= 4 and ranks % 2 == 0:
            groups = groups_of_nodes(dist.distributed_c10d._get_default_group(), ranks // 2)
            self._part("HYBRID_SHARD", lambda: self._case(Case({"process_group": groups, **HYBRID})))
        if self.device.type == "cuda" and _C.why_no_kernels("cuda") is None:
            self._part("a CUDA graph", lambda: self._graph(alone))
        self._part("memory and time", self._costs)
        self._part("a checkpoint", self._checkpoint)
        outcome = f"FAILED: {', '.join(self.failed)}" if self.failed else "all is well"
        self._say(f"{outcome}, in {time.perf_counter() - started:.0f} s")
        if dist.get_rank() == 0:
            print("\n---- to paste into a report ----\n" + "\n".join(self.lines), flush=True)
        dist.barrier()
        return int(bool(self.failed))

    def _say(self, text: str) -> None:
        self.lines.append(text)
        if dist.get_rank() == 0:
            print(text, flush=True)

    def _part(self, name: str, run: Callable[[], str]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text, error = run(), ""
        except Exception as raised:
            text, error = "", f"{type(raised).__name__}: {raised}"
            if dist.get_rank() == 0:
                traceback.print_exc()
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        for rank, error in enumerate(errors):
            if error:
                self._say(f"{name}: FAILED on rank {rank}: {error}")
        if any(errors):
            self.failed.append(name)
        else:
            self._say(f"{name}: {text}")

    # ---- training

    def _model(self, implementation: Any, case: Case) -> nn.Module:
        torch.manual_seed(3)
        arguments = {"device_id": self.device, "auto_wrap_policy": ModuleWrapPolicy({Block})} | case.arguments
        model: nn.Module = implementation(self._net(), **arguments)
        return model

    def _net(self) -> nn.Module:
        blocks = (Block(self.width) for _ in range(3))
        return nn.Sequential(nn.Linear(7, self.width), *blocks, nn.Linear(self.width, 3))

    def _train(self, model: Any, case: Case, steps: int = STEPS) -> Iterator[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randn(5, 7, generator=torch.Generator().manual_seed(dist.get_rank()), device="cpu").to(
            self.device
        )
        for _ in range(steps):
            if case.accumulates:
                with model.no_sync():
                    model(batch.flip(0)).float().square().mean().backward()
            loss = model(batch).float().square().mean()
            loss.backward()
            if case.clips:
                model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    def _case(self, case: Case) -> str:
        ours = self._model(FullyShardedDataParallel, case)
        losses = torch.stack(list(self._train(ours, case))).tolist()
        summed_up = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
        found = []
        if not losses[-1] < losses[0]:
            found.append(f"the loss does not fall: {', '.join(f'{loss:g}' for loss in losses)}")
        if not upstream.HAS_FSDP1:
            _refuse(found)
            return f"{summed_up}; this torch has no FSDP1 to compare with"
        implementation, name = _fsdp1(), "torch's FSDP1"
        if "cpu_offload" in case.arguments and self.device.type == "cpu":  # torch's fails
            implementation, name, case = FullyShardedDataParallel, "fsdp_c without offload", Case({})
        theirs = self._model(implementation, case)
        expected = torch.stack(list(self._train(theirs, case))).tolist()
        wholes = _whole(FullyShardedDataParallel, ours), _whole(implementation, theirs)
        # A loss may differ on one rank alone: from here on no rank waits for another.
        pairs = enumerate(zip(losses, expected, strict=True))
        differ = (
            f"the loss of step {step} is {one!r}, of {name} {other!r}"
            for step, (one, other) in pairs
            if one != other
        )
        found += itertools.islice(differ, 1)
        try:
            _compare(*wholes)
        except AssertionError as error:
            found.append(str(error))
        _refuse(found)
        return f"{summed_up}, bitwise {name} in {STEPS} steps and all parameters"

    def _graph(self, alone: dist.ProcessGroup) -> str:
        """Forwards and backwards that a graph replays, beside the same without one."""
        case = Case({"process_group": alone, "sharding_strategy": ShardingStrategy.NO_SHARD})
        batch = torch.ones(5, 7, device=self.device)
        found = []
        for is_captured in (False, True):
            model, graph = self._model(FullyShardedDataParallel, case), torch.cuda.CUDAGraph()

            def step(model: nn.Module = model) -> None:
                model(batch).square().mean().backward()

            with model.no_sync():  # type: ignore[operator]
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    step()  # makes what is made once
                torch.cuda.current_stream().wait_stream(side)
                if is_captured:
                    with torch.cuda.graph(graph):
                        step()
                for _ in range(2):
                    graph.replay() if is_captured else step()
            named = model.named_parameters()
            found.append({name: param.grad for name, param in named if param.grad is not None})
        _compare(found[1], found[0])
        return "its replays give the gradients of steps without it"

    # ---- costs

    def _costs(self) -> str:
        rows = []
        for name, implementation in _implementations():
            gc.collect()  # the models of before are in cycles
            model = self._model(implementation, Case({}))
            times, host, peak = self._measure(model)
            memory = "" if peak is None else f", peak {peak / 2**20:.1f} MiB"
            rows.append(f"{name} {times:.2f} ms a step, {host:.2f} ms of them until the host is free{memory}")
        return "\n  ".join(["", *rows])

    def _measure(self, model: nn.Module) -> tuple[float, float, int | None]:
        on_device = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        training = self._train(model, Case({}), STEPS + WARM_UP)
        wholes, hosts = [], []
        if on_device is not None:
            on_device.reset_peak_memory_stats()
        for _ in range(STEPS + WARM_UP):
            begin = time.perf_counter()
            next(training)
            hosts.append(1e3 * (time.perf_counter() - begin))
            if on_device is not None:
                on_device.synchronize()
            wholes.append(1e3 * (time.perf_counter() - begin))
        peak = None if on_device is None else on_device.max_memory_allocated()
        return statistics.median(wholes[WARM_UP:]), statistics.median(hosts[WARM_UP:]), peak

    # ---- files

    def _checkpoint(self) -> str:
        case = Case({"use_orig_params": True})
        model, other = (self._model(FullyShardedDataParallel, case) for _ in range(2))
        list(self._train(model, case, 2))
        with tempfile.TemporaryDirectory(prefix="fsdp_c-selftest-") as own:
            folder = [own]
            dist.broadcast_object_list(folder)
            checkpoint.save(model, None, Path(folder[0]) / "saved")
            checkpoint.load(other, None, Path(folder[0]) / "saved")
            _compare(_whole(FullyShardedDataParallel, other), _whole(FullyShardedDataParallel, model))
            dist.barrier()
        return "saved, loaded, and the same"


# ---- parts without a model


def _kernels(device: torch.device) -> str:
    """Each kernel against torch's operators: odd sizes and offsets, strides, values that are not finite."""
    generator = torch.Generator().manual_seed(1)

    def values(numel: int, dtype: torch.dtype) -> Tensor:
        numbers = torch.randn(numel + 3, dtype=torch.float64, generator=generator, device="cpu")
        numbers[::97], numbers[50::97], numbers[70::97] = float("inf"), float("nan"), 1e-30
        return numbers.to(dtype).to(device)[3:]

    for dtype in DTYPES:
        for other in DTYPES:
            for numel in (1, 1031, 300_007):
                tensor, sums = values(numel, dtype), values(numel, other)
                what = f"of {numel} elements from {dtype} to {other}"
                _same(f"cast_divide {what}", OPS.cast_divide(tensor, 3.0, other), tensor.to(other) / 3.0)
                expected = sums + (tensor / 3.0).to(other)
                OPS.accumulate_shard(sums, tensor, 3.0)
                _same(f"accumulate_shard {what}", sums, expected)
            grads = [values(35 * 7, dtype).view(35, 7).t(), values(5, dtype)]
            packed = torch.full((300,), float("nan"), dtype=other, device=device)
            OPS.pack_gradients(packed, grads, [3, 290], 3.0)
            expected = torch.zeros_like(packed)
            expected[3:248], expected[290:295] = grads[0].reshape(-1).to(other), grads[1].to(other)
            _same(f"pack_gradients from {dtype} to {other}", packed, expected / 3.0)
            flat, expected = OPS.flatten(grads, 4, 256, other), torch.zeros(256, dtype=other, device=device)
            expected[:245], expected[248:253] = grads[0].reshape(-1).to(other), grads[1].to(other)
            _same(f"flatten from {dtype} to {other}", flat, expected)
        for part, source in zip(
            OPS.unflatten(flat, [3, 248], [7, 5]), (flat[3:10], flat[248:253]), strict=True
        ):
            _same(f"unflatten of {other}", part, source)
        unscaled, has_inf = tensor.clone(), torch.zeros((), device=device)
        inverse = torch.tensor(1 / 3, device=device)
        OPS.unscale_([unscaled], has_inf, inverse)
        _same(
            f"unscale_ of {dtype}",
            unscaled,
            (tensor.to(torch.promote_types(dtype, torch.float32)) * inverse).to(dtype),
        )
        _same(f"what unscale_ finds in {dtype}", has_inf, torch.ones_like(has_inf))
        shard = OPS.shard(tensor, 1, 4, dtype)
        _same(f"shard of {dtype}", shard, tensor[len(shard) : 2 * len(shard)])
    return "the bits of torch's operators, on " + str(device)


def _streams(device: torch.device) -> str:
    """Kernels run on the stream that is current, after what is there already."""
    module = torch.get_device_module(device)
    side, values = module.Stream(), torch.zeros(1 << 24, device=device)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        for _ in range(50):
            values.add_(1)
        found = OPS.cast_divide(values, 2.0, torch.float32)
        values.zero_()
    module.current_stream().wait_stream(side)
    _same("cast_divide on a stream of the script's", found, torch.full_like(found, 25))
    return "kernels run on the current one"


def _fsdp1() -> Any:
    return importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel


def _implementations() -> Iterator[tuple[str, Any]]:
    yield "fsdp_c", FullyShardedDataParallel
    if upstream.HAS_FSDP1:
        yield "FSDP1", _fsdp1()
    fully_shard = getattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard", None)
    if fully_shard is not None:

        def fsdp2(net: nn.Sequential, device_id: torch.device, auto_wrap_policy: Any) -> Any:
            net.to(device_id)
            for block in net:
                if isinstance(block, Block):
                    fully_shard(block)
            return fully_shard(net)

        yield "FSDP2", fsdp2


def _whole(implementation: Any, model: nn.Module) -> dict[str, Tensor]:
    with implementation.summon_full_params(model, writeback=False):
        names = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
        return {name: param.detach().clone() for name, param in names.items()}


def _refuse(found: list[str]) -> None:
    if found:
        raise AssertionError("; ".join(found))


def _compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if actual.keys() != expected.keys():
        raise AssertionError(f"parameters are {', '.join(actual)}, but should be {', '.join(expected)}")
    for name, tensor in expected.items():
        _same(f"parameter {name}", actual[name], tensor)


def _same(what: str, actual: Tensor, expected: Tensor) -> None:
    """AssertionError with the first element that differs. A NaN is any NaN."""
    differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{what}: {actual.dtype} of {list(actual.shape)}, not {expected.dtype} of {list(expected.shape)}"
        )
    if count := int(differs.sum()):
        first = int(differs.flatten().nonzero()[0])
        one, other = actual.flatten()[first].item(), expected.flatten()[first].item()
        raise AssertionError(
            f"{what}: element {first} is {one!r}, not {other!r}; {count} of {actual.numel()} differ"
        )
