"""Self-test (``python -m fsdp_c selftest``): kernels, streams, bitwise parity with FSDP1, and a checkpoint."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import FullyShardedDataParallel, MixedPrecision, checkpoint
from fsdp_c.compat import upstream
from fsdp_c.sharding.process_groups import all_gather_objects
from fsdp_c.tools import environment
from fsdp_c.wrap import ModuleWrapPolicy

OPS = torch.ops.fsdp_c
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RUNS = {"FULL_SHARD": {}, "bfloat16, original parameters": {"mixed_precision": BF16, "use_orig_params": True}}


def main(device: str | None, width: int) -> int:
    """Run on torchrun's ranks, or start one rank per device of this machine. Return 0 on success, else 1."""
    device = device or str(getattr(torch.accelerator.current_accelerator(True), "type", "cpu"))
    module = torch.get_device_module(device)
    if "RANK" not in os.environ:
        count = 2 if device == "cpu" else module.device_count()
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        own = ["-m", "fsdp_c", "selftest", f"--device={device}", f"--width={width}"]
        return subprocess.run([sys.executable, *torchrun, *own], check=False).returncode
    here, backend, parts = torch.device("cpu"), "gloo", {}
    if device != "cpu":
        here = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")) % module.device_count())
        module.set_device(here)
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
        parts["streams"] = partial(_streams, here)
    parts["kernels"] = partial(_kernels, here)
    parts |= {name: partial(_training, here, width, arguments) for name, arguments in RUNS.items()}
    parts["a checkpoint"] = partial(_checkpoint, here, width)
    warnings.simplefilter("ignore")
    dist.init_process_group(backend)
    lines, failed = [environment.report(), f"{dist.get_world_size()} ranks on {device}"], []
    for name, part in parts.items():
        try:
            text, error = part(), None
        except Exception:
            text, error = "", traceback.format_exc()
        errors = all_gather_objects(error, None)  # a part fails if any rank fails
        found = [f"{name}: FAILED on rank {rank}: {error}" for rank, error in enumerate(errors) if error]
        lines += found or [f"{name}: {text}"]
        failed += [name] if found else []
    if dist.get_rank() == 0:
        print(*lines, f"FAILED: {', '.join(failed)}" if failed else "all is well", sep="\n", flush=True)
    dist.barrier()  # torchrun ends the other ranks once one has exited with an error
    dist.destroy_process_group()
    return int(bool(failed))


def _kernels(device: torch.device) -> str:
    """Compare kernels with torch's operators: odd sizes and offsets, strides, inf and NaN."""
    torch.manual_seed(1)
    numbers = torch.randn(300_010, dtype=torch.float64, device="cpu")
    numbers[::97], numbers[50::97], numbers[70::97] = float("inf"), float("nan"), 1e-30
    for dtype, other in itertools.product(DTYPES, DTYPES):
        tensor, sums = numbers.to(device, dtype)[3:], numbers.flip(0).to(device, other)[3:]
        expected = sums + (tensor / 3.0).to(other)
        OPS.accumulate_shard(sums, tensor, 3.0)
        _same(f"accumulate_shard {dtype} {other}", sums, expected)
        grads = [tensor[:245].view(35, 7).t(), tensor[245:250]]
        packed = torch.full((300,), float("nan"), dtype=other, device=device)
        OPS.pack_gradients(packed, grads, [3, 248], 3.0)
        expected = nn.functional.pad(torch.cat([grad.reshape(-1) for grad in grads]).to(other), (3, 47))
        _same(f"pack_gradients {dtype} {other}", packed, expected / 3.0)
    return f"the bits of torch's operators on {device}"


def _streams(device: torch.device) -> str:
    """Run a kernel on a side stream, after queued work."""
    module = torch.get_device_module(device)
    side, values = module.Stream(), torch.zeros(1 << 24, device=device)
    found = torch.empty_like(values)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        for _ in range(50):
            values.add_(1)
        OPS.pack_gradients(found, [values], [0], 2.0)
        values.zero_()
    module.current_stream().wait_stream(side)
    _same("pack_gradients on a side stream", found, torch.full_like(found, 25))
    return "kernels run on the current stream"


def _train(fsdp: Any, device: torch.device, width: int, arguments: dict[str, Any]) -> tuple[Any, list[float]]:
    """Return a model after ten steps, and its losses."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(7, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 3))
    model = fsdp(net, device_id=device, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    batch, losses = torch.randn(5, 7, device="cpu").to(device), []
    for _ in range(10):
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def _training(device: torch.device, width: int, arguments: dict[str, Any]) -> str:
    model, losses = _train(FullyShardedDataParallel, device, width, arguments)
    result = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if not upstream.HAS_FSDP1:
        return f"{result}; this torch has no FSDP1 to compare with"
    torchs = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
    theirs, expected = _train(torchs, device, width, arguments)
    found, wanted = {"losses": losses, **model.state_dict()}, {"losses": expected, **theirs.state_dict()}
    _same("losses and parameters", found, wanted)
    return f"{result}, bitwise torch's FSDP1 in {len(losses)} steps"


def _checkpoint(device: torch.device, width: int) -> str:
    model, _ = _train(FullyShardedDataParallel, device, width, {})
    expected = model.state_dict()
    with tempfile.TemporaryDirectory(prefix="fsdp_c-selftest-") as own:
        path = f"{all_gather_objects(own, None)[0]}/saved"
        checkpoint.save(model, None, path)
        model.load_state_dict({name: torch.zeros_like(value) for name, value in expected.items()})
        checkpoint.load(model, None, path)
        dist.barrier()
    _same("parameters", dict(model.state_dict()), dict(expected))
    return "saved and loaded with equal values"


def _same(what: str, actual: Any, expected: Any) -> None:
    """Raise AssertionError, with the first differing element, unless all values are equal. NaNs are equal."""
    exact: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(actual, expected, **exact, msg=lambda text: f"{what}: {text}")
