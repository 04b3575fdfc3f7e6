"""What examples/train_lm.py learns where its parameters are bfloat16, by what FlatAdamW keeps of them.

python -m benchmarks.low_precision --markdown table.md
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import kernels

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

from fsdp_c.optim import FlatAdamW

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_lm  # noqa: E402  # an example, by its path
from lm_data import load_text  # noqa: E402

COUNTED = """\
Losses on held-out text in nats per byte, after so many steps of `examples/train_lm.py {arguments}` on one rank:
the mean and, after "+/-", half of the range over {seeds} seeds of weights, batches and draws. Gradients are computed in
bf16 but for "fp32". "bytes" are those that the optimizer's state takes of an element.
"""
BF16, FP32 = torch.bfloat16, torch.float32
# name: dtype of the parameters, mixed precision, options of FlatAdamW, bytes
IN_8_BITS = {"state_dtype": torch.uint8}
KINDS: dict[str, tuple[torch.dtype, str, dict[str, Any], float]] = {
    "fp32": (FP32, "none", {}, 8),
    "fp32, 8-bit state": (FP32, "none", IN_8_BITS, 2.03),
    "fp32, computed in bf16": (FP32, "bf16", {}, 8),
    "bf16": (BF16, "none", {}, 4),
    "bf16, fp32 state": (BF16, "none", {"state_dtype": FP32}, 8),
    "bf16 with masters": (BF16, "none", {"master_dtype": FP32}, 10),
    "bf16 stochastic, fp32 state": (BF16, "none", {"rounding": "stochastic", "state_dtype": FP32}, 8),
    "bf16 stochastic, bf16 state": (BF16, "none", {"rounding": "stochastic"}, 4),
    "bf16 with masters, 8-bit state": (BF16, "none", {"master_dtype": FP32} | IN_8_BITS, 4.03),
    "bf16 stochastic, 8-bit state": (BF16, "none", {"rounding": "stochastic"} | IN_8_BITS, 2.03),
}


class Trainer(train_lm.Trainer):
    def __init__(self, kind: str, args: argparse.Namespace, *more: Any) -> None:
        self.dtype, args.mixed_precision, options, _ = KINDS[kind]
        super().__init__("fsdp_c", args, *more)
        if "rounding" in options:
            options = options | {"seed": args.seed}
        self.optimizer = FlatAdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01, **options
        )

    def wrap(self, model: Any) -> Any:
        return super().wrap(model.to(self.dtype))


def losses(kind: str, arguments: list[str], seeds: int) -> dict[int, list[float]]:
    """By step, one for each seed."""
    found: dict[int, list[float]] = {}
    for seed in range(seeds):
        args = train_lm.parse_arguments([*arguments, "--seed", str(seed)])
        ranks = train_lm.Ranks(0, 1, torch.device("cpu"))
        trainer = Trainer(kind, args, ranks, load_text(args.data, args.context))
        trainer.train(None)
        for step, loss in trainer.progress.evaluations:
            found.setdefault(step, []).append(loss)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", nargs="+", default=["3e-3", "1e-4"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--markdown", type=Path)
    own = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shared = ["--layers", "4", "--width", "128", "--device", "cpu", "--eval-batches", "32"]
    shared += ["--steps", str(own.steps), "--eval-every", str(own.steps // 3)]
    counted = COUNTED.format(arguments=" ".join(shared), seeds=own.seeds)
    about = f"{kernels.versions()}; load {os.getloadavg()[0]:.1f}."
    lines = [f"# Training in bf16, {time.strftime('%Y-%m-%d')}", "", *counted.splitlines(), "", about]
    for lr in own.lr:
        lines += ["", f"## --lr {lr}", ""]
        for index, kind in enumerate(own.kinds):
            found = losses(kind, [*shared, "--lr", lr], own.seeds)
            if not index:
                lines.append("| parameters | bytes | " + " | ".join(f"step {step}" for step in found) + " |")
                lines.append("|---|---:" + "|---:" * len(found) + "|")
            cells = [
                f"{sum(each) / len(each):.4f} +/- {(max(each) - min(each)) / 2:.4f}"
                for each in found.values()
            ]
            lines.append(f"| {kind} | {KINDS[kind][-1]} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
            if own.markdown:
                own.markdown.write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
