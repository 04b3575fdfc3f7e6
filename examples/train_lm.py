"""Train a byte-level language model with FullyShardedDataParallel.

    torchrun --nproc-per-node 2 examples/train_lm.py
    torchrun --nproc-per-node 2 examples/train_lm.py --data my_text/ --out runs/mine --mixed-precision bf16
    torchrun --nproc-per-node 2 examples/train_lm.py --out runs/mine --resume auto

Ranks use GPUs with NCCL if there is a GPU per rank, else the CPU with gloo. ``--impl torch`` trains with
torch's own FSDP. ``--against torch`` trains a second time with it and prints the largest difference.
"""

import argparse
import importlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lm_checkpoint import (
    RUN_FILE,
    find_checkpoints,
    load_checkpoint,
    open_run_folder,
    save_checkpoint,
    write_atomically,
)
from lm_data import Batches, InputError, Text, load_text
from lm_model import GPT, Block, ModelConfig, generate
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from fsdp_c.checkpoint import BackgroundSave

# Both packages export the same names, so the choice of a package is the only difference.
IMPLEMENTATIONS = {"fsdp_c": "fsdp_c", "torch": "torch.distributed.fsdp"}
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
PRECISIONS: dict[str, dict[str, torch.dtype] | None] = {
    "none": None,
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "bf16-reduce-fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}
T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser that prints an error on one rank only."""

    def error(self, message: str) -> NoReturn:
        if int(os.environ.get("RANK", "0")) == 0:
            super().error(message)
        sys.exit(0)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--data",
        metavar="PATH",
        help="text to learn, a file or a folder (default: Python's standard library)",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs/lm"),
        help="folder for checkpoints, loss curve and sample (default: runs/lm)",
    )
    add(
        "--resume",
        metavar="PATH|auto",
        help="continue from a checkpoint, or from the newest intact one in --out if there is one",
    )
    add("--overwrite", action="store_true", help="replace an earlier run in --out")

    add(
        "--impl", choices=IMPLEMENTATIONS, default="fsdp_c", help="implementation of FullyShardedDataParallel"
    )
    add(
        "--against",
        choices=IMPLEMENTATIONS,
        help="train again with this one and print the largest difference",
    )
    add("--strategy", choices=STRATEGIES, default="full_shard")
    add("--mixed-precision", choices=PRECISIONS, default="none")
    add(
        "--use-orig-params", action="store_true", help="keep the original parameters visible to the optimizer"
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")

    add("--layers", type=positive, default=ModelConfig.layers)
    add("--width", type=positive, default=ModelConfig.width)
    add("--heads", type=positive, default=ModelConfig.heads)
    add("--context", type=positive, default=ModelConfig.context, help="bytes of context for each prediction")

    add("--steps", type=positive, default=200, help="optimizer steps")
    add("--batch", type=positive, default=4, help="sequences per rank and micro step")
    add(
        "--accumulate",
        type=positive,
        default=2,
        help="micro steps per optimizer step; only the last one reduces gradients",
    )
    add("--lr", type=positive_float, default=3e-3, help="peak learning rate")
    add("--warmup", type=positive, default=20, help="steps of linear warmup before the cosine")
    add("--clip", type=positive_float, default=1.0, help="largest norm of the gradients")
    add("--seed", type=int, default=0)
    add("--eval-every", type=positive, default=50, metavar="STEPS")
    add("--eval-batches", type=positive, default=8, help="held-out batches per rank")
    add("--checkpoint-every", type=positive, default=100, metavar="STEPS")
    add("--keep", type=positive, default=2, help="checkpoints to keep")
    add("--sample-bytes", type=int, default=200, help="bytes of text to generate at the end")

    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not divisible by --heads {args.heads}")
    if args.overwrite and args.resume:
        parser.error("--overwrite and --resume exclude each other")
    if args.against == args.impl:
        parser.error(f"--against {args.against} compares {args.impl} with itself; choose another --impl")
    return args


@dataclass(frozen=True)
class Ranks:
    """This process' rank, the number of ranks, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        if self.is_first:
            tqdm.write(text)
            sys.stdout.flush()

    def agree(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``. Raises InputError on all ranks if ``work`` raises it on any rank."""
        result, error = None, None
        try:
            result = work()
        except InputError as caught:
            error = str(caught)
        errors: list[str | None] = [None] * self.world_size
        dist.all_gather_object(errors, error)
        for first in filter(None, errors):
            raise InputError(first)
        return result  # type: ignore[return-value]


def start_ranks(device_name: str) -> Ranks:
    """Join the process group of torchrun; without torchrun, create a group of one rank."""
    local_rank, local_world_size = (
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    use_cuda = device_name == "cuda" or (device_name == "auto" and gpus >= local_world_size)
    if use_cuda and gpus < local_world_size:
        raise InputError(f"--device cuda: {gpus} GPUs for {local_world_size} ranks")
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if use_cuda else "gloo", **store)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


@dataclass
class Progress:
    """The progress of a run. Losses are nats per byte, averaged over the ranks."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)


class Trainer:
    """A model wrapped by one implementation of FSDP, its optimizer and its progress."""

    def __init__(self, implementation: str, args: argparse.Namespace, ranks: Ranks, text: Text) -> None:
        self.fsdp = importlib.import_module(IMPLEMENTATIONS[implementation])
        self.implementation, self.args, self.ranks = implementation, args, ranks
        self.config = ModelConfig(args.layers, args.width, args.heads, args.context)
        self.batches = Batches(text, args.context, args.batch, args.seed, ranks.rank, ranks.world_size)
        self.progress = Progress()
        torch.manual_seed(args.seed)  # equal initial weights on every rank
        self.model = self.wrap(GPT(self.config))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01
        )

    def wrap(self, model: GPT) -> Any:
        """Wrap each block as a unit; the root unit holds the other parameters."""
        wrap = importlib.import_module(IMPLEMENTATIONS[self.implementation] + ".wrap")
        precision = PRECISIONS[self.args.mixed_precision]
        return self.fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=self.fsdp.ShardingStrategy[self.args.strategy.upper()],
            auto_wrap_policy=wrap.ModuleWrapPolicy({Block}),
            mixed_precision=self.fsdp.MixedPrecision(**precision) if precision else None,
            use_orig_params=self.args.use_orig_params,
            device_id=self.ranks.device,
        )

    # Training

    def train(self, out: Path | None) -> None:
        """Train up to the last step, with evaluations. Write checkpoints to ``out`` unless it is None."""
        args, progress = self.args, self.progress
        bar = tqdm(
            total=args.steps,
            initial=progress.step,
            desc=self.implementation,
            unit="step",
            disable=not self.ranks.is_first,
        )
        while progress.step < args.steps:
            started = time.perf_counter()
            loss = self.train_step(progress.step)
            progress.losses.append(loss)
            progress.step += 1
            tokens = args.accumulate * args.batch * args.context * self.ranks.world_size
            bar.set_postfix(
                loss=f"{loss:.3f}",
                tokens_per_s=f"{tokens / (time.perf_counter() - started):.0f}",
                refresh=False,
            )
            bar.update()
            last = progress.step == args.steps
            if last or progress.step % args.eval_every == 0:
                self.evaluate()
            if out and (last or progress.step % args.checkpoint_every == 0):
                saving = self.save(out)
                if last and saving:
                    saving.wait()
        bar.close()

    def train_step(self, step: int) -> float:
        """Run one optimizer step and return the mean loss over micro steps and ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * self.schedule(step)
        micro_batches = self.batches.training(step, self.args.accumulate)
        total = torch.zeros((), device=self.ranks.device)
        for index, (inputs, targets) in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else self.model.no_sync():
                loss = self.loss(inputs, targets) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        self.model.clip_grad_norm_(self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean_over_ranks(total)

    def schedule(self, step: int) -> float:
        """Return the factor of the learning rate: linear warmup, then a cosine decay to a tenth."""
        if step < self.args.warmup:
            return (step + 1) / self.args.warmup
        done = (step - self.args.warmup) / max(1, self.args.steps - self.args.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs.to(self.ranks.device))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.to(self.ranks.device).flatten())

    def mean_over_ranks(self, value: Tensor) -> float:
        dist.all_reduce(value)
        return value.item() / self.ranks.world_size

    @torch.no_grad()
    def evaluate(self) -> None:
        """Record and print the loss on the held-out text."""
        self.model.eval()
        batches = self.batches.evaluation(self.args.eval_batches)
        losses = [self.loss(inputs, targets) for inputs, targets in batches]
        self.model.train()
        nats = self.mean_over_ranks(torch.stack(losses).mean())
        self.progress.evaluations.append((self.progress.step, nats))
        entropy = self.batches.text.unigram_entropy()
        self.ranks.say(
            f"step {self.progress.step}: held-out loss {in_bits(nats)}; unigram entropy of the text "
            f"{in_bits(entropy)}"
        )

    # State

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of all unsharded parameters, by their names in the plain model. Collective."""
        with self.fsdp.FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def save(self, out: Path) -> BackgroundSave | None:
        """Write a checkpoint, in the background with fsdp_c. Collective."""
        extra = {"data": self.batches.text.checksum} | asdict(self.progress)
        path = out / f"step-{self.progress.step:06d}"
        return save_checkpoint(path, self.model, self.optimizer, extra, self.args.keep)

    def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint. Collective. Raises InputError on all ranks if it is damaged or of
        another model.
        """
        extra = load_checkpoint(checkpoint, self.model, self.optimizer)
        try:
            evaluations = [(step, nats) for step, nats in extra["evaluations"]]
            self.progress = Progress(extra["step"], list(extra["losses"]), evaluations)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{checkpoint}: not a checkpoint of this script ({error!r})") from error
        if extra["data"] != self.batches.text.checksum:
            self.ranks.say(f"note: {checkpoint} was trained on another text")

    def load_first(self, checkpoints: list[Path]) -> Path | None:
        """Continue from the first intact checkpoint and print each damaged one. Collective."""
        for index, checkpoint in enumerate(checkpoints):
            try:
                self.load(checkpoint)
                return checkpoint
            except InputError as error:
                if index == len(checkpoints) - 1:
                    raise
                self.ranks.say(f"note: {error}; trying the one before")
        return None


def in_bits(nats: float) -> str:
    return f"{nats / math.log(2):.3f} bits ({nats:.3f} nats) per byte"


def draw_losses(progress: Progress, entropy: float, path: Path) -> None:
    """Write the loss curve as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(progress.losses) + 1), progress.losses, linewidth=1, label="training")
    if progress.evaluations:
        axes.plot(*zip(*progress.evaluations, strict=True), "o-", label="held-out")
    axes.axhline(entropy, color="gray", linestyle="--", label="unigram entropy of the text")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes.legend()
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def write_sample(trainer: Trainer, parameters: dict[str, Tensor], out: Path) -> None:
    """Write the trained model's continuation of the beginning of the held-out text."""
    plain = GPT(trainer.config).to(trainer.ranks.device)
    plain.load_state_dict(parameters)
    prompt = bytes(trainer.batches.text.held_out[: min(64, trainer.config.context)].tolist())
    sample = generate(plain, prompt, trainer.args.sample_bytes).decode(errors="replace")
    write_atomically(out / "sample.txt", lambda path: path.write_text(sample))
    trainer.ranks.say(f"sample, {len(prompt)} bytes of it given:\n{sample}")


def largest_difference(ours: Trainer, theirs: Trainer) -> float:
    """Print and return the largest difference of any loss or parameter between two runs. Collective."""
    losses = max(
        (abs(a - b) for a, b in zip(ours.progress.losses, theirs.progress.losses, strict=True)), default=0.0
    )
    mine, other = ours.full_parameters(), theirs.full_parameters()
    parameters = max((mine[name] - other[name]).abs().max().item() for name in mine.keys() | other.keys())
    ours.ranks.say(
        f"largest difference between {ours.implementation} and {theirs.implementation}, {ours.progress.step} "
        f"steps: losses {losses:g}, parameters {parameters:g}"
    )
    return max(losses, parameters) if math.isfinite(losses + parameters) else math.inf


def prepare(args: argparse.Namespace, ranks: Ranks) -> tuple[Text, list[Path]]:
    """Return the text and the checkpoints to try. Collective. Raises InputError on all ranks if either is
    unusable.
    """
    text = ranks.agree(lambda: load_text(args.data, args.context))
    checksums = [0] * ranks.world_size
    dist.all_gather_object(checksums, text.checksum)
    if len(set(checksums)) != 1:
        raise InputError(f"the ranks read different texts from {text.source}")
    checkpoints = ranks.agree(lambda: find_checkpoints(args.resume, args.out) if args.resume else [])
    return text, checkpoints


def describe(trainer: Trainer) -> str:
    numel = sum(parameter.numel() for parameter in GPT(trainer.config).parameters())
    text, ranks = trainer.batches.text, trainer.ranks
    return (
        f"{numel / 1e6:.2f} M parameters, {ranks.world_size} ranks on {ranks.device.type}, "
        f"{trainer.args.strategy}; {len(text.train):,} bytes to learn and {len(text.held_out):,} held out of "
        f"{text.source}"
    )


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Run the whole job and return the exit status."""
    text, checkpoints = prepare(args, ranks)
    trainer = Trainer(args.impl, args, ranks, text)
    checkpoint = trainer.load_first(checkpoints)
    folder_options = {"resumed": checkpoint, "resume": args.resume, "overwrite": args.overwrite}
    ranks.agree(lambda: open_run_folder(args.out, **folder_options) if ranks.is_first else None)
    ranks.say(describe(trainer))
    if ranks.is_first:
        settings = json.dumps({**vars(args), "out": str(args.out)}, indent=2)
        write_atomically(args.out / RUN_FILE, lambda path: path.write_text(settings))
    if checkpoint:
        ranks.say(f"resumed from {checkpoint}: {trainer.progress.step} of {args.steps} steps done")

    trainer.train(args.out)
    parameters = trainer.full_parameters()
    if ranks.is_first:
        draw_losses(trainer.progress, text.unigram_entropy(), args.out / "loss.png")
        write_sample(trainer, parameters, args.out)
    # other ranks wait until the first has drawn and written its files
    dist.barrier(device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None)
    ranks.say(f"checkpoints, loss curve and sample are in {args.out}")
    if not args.against:
        return 0

    other = Trainer(args.against, args, ranks, text)
    if checkpoint:
        other.load(checkpoint)
    other.train(None)
    return 0 if largest_difference(trainer, other) == 0 else 1


def main() -> int:
    # torch deprecates the selection of state dicts that FSDP1 uses
    warnings.filterwarnings("ignore", category=FutureWarning)
    args = parse_arguments()
    try:
        return run(args, start_ranks(args.device))
    except InputError as error:
        # One rank prints and fails. If all failed, torchrun could end the first before it prints.
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 2
        return 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
