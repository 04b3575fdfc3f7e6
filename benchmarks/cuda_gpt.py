"""A GPT of 1.3 billion parameters (the head apart) in bf16 on one GPU: fsdp_c beside torch's FSDP1 and FSDP2.

python -m benchmarks.cuda_gpt [--trace folder] [--json out.json]

One rank of an imagined --world: the collectives are torch's fake ones, which copy on the device and send
nothing. What is measured: the time of a step and its peak memory; with --trace a profiler trace of a step,
where gathers lie beside the computation; and, of a model so narrow that the device always waits for the host,
by how much a forward and backward is longer per unit than without FSDP. Each implementation runs in a process
of its own, one after the other, by one command. It needs a GPU, and has not run on one yet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks import common

import torch  # isort: skip  (after common, which sets the number of threads)
import torch.distributed as dist  # isort: skip
import torch.nn.functional as F  # isort: skip
from torch import Tensor, nn  # isort: skip
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard  # isort: skip
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # isort: skip
from torch.testing._internal.distributed.fake_pg import FakeStore  # isort: skip

VOCABULARY = 50304
SHOWN = ("step ms", "peak GiB", "reserved GiB", "host ms per unit")
PLAIN = "no FSDP"
NARROW = ("--width", "256", "--length", "32", "--batch", "1", "--world", "2", "--steps", "40")
REPEATS = 5


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding, blocks, head; the loss is returned."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1))


def wrap(implementation: str, model: nn.Module, device: torch.device) -> nn.Module:
    """Shard per block, parameters and gradients in bf16."""
    if implementation == PLAIN:
        return model.to(torch.bfloat16)
    if implementation == "torch.fsdp2":
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in [*(module for module in model.modules() if isinstance(module, Block)), model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return common.fsdp_class(implementation)(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            use_orig_params=True,
            device_id=device,
        )


def seconds(step: Any, count: int, device: torch.device) -> float:
    """Of one step, the host being as far ahead of the device as it likes: the median of some runs of
    ``count``."""
    found = []
    for _ in range(REPEATS):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(device)
        found.append((time.perf_counter() - begin) / count)
    return statistics.median(found)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(implementation: str, arguments: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Any]:
    """The wrapped model, and what makes a loss of it."""
    torch.manual_seed(0)
    with device:
        model = GPT(arguments.layers, arguments.width, arguments.heads, arguments.length)
        tokens = torch.randint(VOCABULARY, (arguments.batch, arguments.length))
    model = wrap(implementation, model, device)
    return model, lambda: model(tokens)


def measure(implementation: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One row, but for the host's part; run in a process of its own."""
    device = start(arguments)
    if arguments.host:
        return {"seconds": host_seconds(implementation, arguments, device)}
    model, loss = build(implementation, arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(arguments.warmup):
        step()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step_ms = 1000 * seconds(step, max(1, arguments.steps // REPEATS), device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    reserved = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0
    if arguments.trace:
        profile(step, arguments.trace / f"{implementation}.json.gz", device)
    return dict(zip(SHOWN, (step_ms, peak, reserved), strict=False))


def start(arguments: argparse.Namespace) -> torch.device:
    """The device, and the group of the imagined ranks."""
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", rank=0, world_size=arguments.world, store=FakeStore())
    return device


def host_seconds(implementation: str, arguments: argparse.Namespace, device: torch.device) -> float:
    """Of a forward and backward of a model that keeps the device idle."""
    model, loss = build(implementation, arguments, device)

    def step() -> None:
        loss().backward()
        model.zero_grad()

    for _ in range(arguments.warmup):
        step()
    return seconds(step, arguments.steps, device)


def profile(step: Any, path: Path, device: torch.device) -> None:
    """A trace of one step, for chrome://tracing or Perfetto."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profiler:
        step()
        synchronize(device)
    profiler.export_chrome_trace(str(path))


def parse() -> argparse.Namespace:
    """The command line; the defaults are 1.3 billion parameters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "layers": 24,
        "width": 2048,
        "heads": 16,
        "length": 1024,
        "batch": 4,
        "world": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script out"
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=(*common.IMPLEMENTATIONS, PLAIN), help=argparse.SUPPRESS)
    parser.add_argument("--host", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(implementation: str, *options: str) -> dict[str, float]:
    """What a process of its own has measured; nothing, and its own words, where it failed."""
    command = [sys.executable, "-m", "benchmarks.cuda_gpt", *sys.argv[1:], *options, "--only", implementation]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{implementation} failed", file=sys.stderr)
        return {}
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def rows(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One row per implementation. What fails is left out, and stops nobody else."""
    plain = run(PLAIN, "--host", *NARROW).get("seconds")
    found = {}
    for implementation in common.IMPLEMENTATIONS:
        found[implementation] = run(implementation)
        wrapped = run(implementation, "--host", *NARROW).get("seconds")
        if plain and wrapped:
            found[implementation][SHOWN[-1]] = 1000 * (wrapped - plain) / (arguments.layers + 1)
    return found


def main() -> None:
    """Measure all implementations, each in its own process, and print a table."""
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here")
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments)))
        return
    found = rows(arguments)
    print(
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, {arguments.layers} layers of "
        f"{arguments.width}"
    )
    print(f"{'':14}" + "".join(f"{name:>18}" for name in SHOWN))
    for implementation, row in found.items():
        print(f"{implementation:14}" + "".join(f"{row.get(name, float('nan')):18.3f}" for name in SHOWN))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    if any(len(row) < len(SHOWN) for row in found.values()):
        raise SystemExit("not all was measured: what failed says why above")


if __name__ == "__main__":
    main()
