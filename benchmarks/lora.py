"""Adapters in a Llama with frozen parameters: bytes sent and memory held in a step of FSDP1, FSDP2 and
fsdp_c.

python -m benchmarks.lora                                    # 1.3 B parameters on 8 GPUs
python -m benchmarks.lora --model 6.7B --markdown benchmarks/results/lora.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

RANK = 8
# name: (implementation, use_orig_params, True if frozen parameters are in their own units)
ROWS: dict[str, tuple[str, bool, bool]] = {
    "FSDP1, use_orig_params": ("torch.fsdp1", True, False),
    "FSDP2": ("torch.fsdp2", True, False),
    "fsdp_c, use_orig_params": ("fsdp_c", True, False),
    "fsdp_c, use_orig_params, split_frozen": ("fsdp_c", True, True),
    "fsdp_c, flat parameters": ("fsdp_c", False, False),
}
ABOUT = """\
Each row is a process that computes nothing: the simulated GPU (docs/testing.md) follows shapes, streams and torch's
allocator. One unit per block, bf16 with fp32 shards and reductions, adapters of rank 8 on every linear layer of a
block, trained by AdamW; all other parameters are frozen. Bytes sent are those of one step and one rank: the outputs of
its all-gathers and the inputs of its reductions. FSDP1 without use_orig_params refuses the model.
"""


# ---- the model


def with_adapters(model: nn.Module) -> nn.Module:
    """Replace every linear layer of a block by ``layer(x) + up(down(x))``, of which only ``up`` and ``down``
    are trained.
    """
    from torch import Tensor, nn

    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer
            self.down = nn.Linear(layer.in_features, RANK, bias=False)
            self.up = nn.Linear(RANK, layer.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            adapted: Tensor = self.layer(x) + self.up(self.down(x))
            return adapted

    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        layers = [(name, layer) for name, layer in block.named_modules() if isinstance(layer, nn.Linear)]
        for name, layer in layers:
            block.set_submodule(name, Adapted(layer))
    return model


def wrapped(model: nn.Module, implementation: str, use_orig_params: bool, split: bool) -> nn.Module:
    import torch
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from benchmarks.common import fsdp_class
    from benchmarks.timeline.models import Block, fsdp2
    from benchmarks.timeline.row import Row
    from fsdp_c.wrap import split_frozen

    if implementation == "torch.fsdp2":
        return fsdp2(Row(implementation, "", ""), model, None, {})
    with split_frozen() if split else nullcontext():
        return fsdp_class(implementation)(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cuda", 0),
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
        )


# ---- simulation of one row


def run_row(name: str, model_name: str, world_size: int) -> dict[str, float]:
    import torch
    import torch._meta_registrations  # shapes of operators registered in Python only
    import torch.distributed as dist
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from benchmarks.timeline.models import Llama
    from benchmarks.timeline.shapes import MODELS

    sent = {"gathered": 0, "reduced": 0, "gathers": 0, "reductions": 0}

    def nbytes_of(value: Any) -> int:
        return value.nbytes if isinstance(value, Tensor) else sum(map(nbytes_of, value))

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(operator)
            if name.startswith("c10d.") and "gather" in name:
                sent["gathered"] += nbytes_of(args[0])
                sent["gathers"] += 1
            elif name.startswith("c10d.") and "reduce" in name:
                sent["reduced"] += nbytes_of(args[1] if "scatter" in name else args[0])
                sent["reductions"] += 1
            return operator(*args, **(kwargs or {}))

    torch.set_num_threads(1)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=world_size)
    shape = MODELS[model_name]
    with torch.device("cuda"):
        plain = with_adapters(Llama(shape, shape.sequence))
    trained = sum(parameter.numel() for parameter in plain.parameters() if parameter.requires_grad)
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    model = wrapped(plain, *ROWS[name])
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-3)
    tokens = torch.zeros(1, shape.sequence, dtype=torch.long, device="cuda")
    gradients = 0
    for number in range(4):
        if number == 1:
            torch.cuda.empty_cache()  # free the memory that only the first step uses
        if number == 3:
            torch.cuda.reset_peak_memory_stats()
        with Collectives() if number == 2 else nullcontext():
            model(tokens, tokens).backward()
        held = [getattr(param.grad, "_local_tensor", param.grad) for param in model.parameters()]
        storages = [grad.untyped_storage() for grad in held if grad is not None]
        gradients = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "trained": trained,
        "parameters": parameters,
        **sent,
        "gradients": gradients,
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


# ---- the table


def in_a_process(name: str, model: str, world_size: int) -> dict[str, float]:
    from benchmarks.timeline import measure

    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lora", "--row", name, "--model", model]
    command += ["--world-size", str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | measure.environment())
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def table(results: dict[str, dict[str, float]], model: str, world_size: int) -> str:
    first = next(iter(results.values()))
    trained, parameters = first["trained"], first["parameters"]
    lines = [
        f"**{model}** on {world_size} GPUs: {trained / 1e6:.1f} of {parameters / 1e6:.0f} million parameters "
        "trained",
        "",
        "| | reductions | reduced MiB | / trained | gradients MiB | / trained | all-gathers | gathered MiB | "
        "peak allocated MiB | peak reserved MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, each in results.items():
        lines.append(
            f"| {name} | {each['reductions']:.0f} | {each['reduced'] / 2**20:.1f} | "
            f"{each['reduced'] / (4 * trained):.3f} | {each['gradients'] / 2**20:.2f} | "
            f"{each['gradients'] * world_size / (4 * trained):.3f} | {each['gathers']:.0f} | "
            f"{each['gathered'] / 2**20:.0f} | {each['peak'] / 2**20:.0f} | {each['reserved'] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.3B", choices=["0.4B", "1.3B", "6.7B"])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(run_row(args.row, args.model, args.world_size)))
        return
    results = {name: in_a_process(name, args.model, args.world_size) for name in ROWS}
    text = table(results, args.model, args.world_size)
    print(text)
    if args.markdown:
        args.markdown.write_text(f"# LoRA on the simulated GPU\n\n{ABOUT}\n{text}\n")


if __name__ == "__main__":
    main()
