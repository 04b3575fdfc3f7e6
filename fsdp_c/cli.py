"""python -m fsdp_c: run a script with fsdp_c in the place of torch's FSDP1, plan how a model would be
wrapped, or say what is installed."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_c import host_cost, interop
from fsdp_c.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_c.sharding.wrap import Policy
from fsdp_c.tools import environment
from fsdp_c.tools.summary import TEXT_WIDTH, Summary
from fsdp_c.tools.summary import plan as plan_of
from fsdp_c.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

EPILOG = """\
commands:
  run SCRIPT [ARGUMENT ...]       run a script that uses torch.distributed.fsdp as it is
  run -m MODULE [ARGUMENT ...]    the same for a module
  plan MODULE:CALLABLE ...        show units, sizes, collectives and memory of a model; no ranks, no memory for it
  env                             show versions, what was found here, and which kernels are used: for reports
  selftest                        try kernels, training, memory, time and a checkpoint on this machine, beside torch's

  torchrun --nproc-per-node 8 -m fsdp_c train.py --lr 0.1
  torchrun --nproc-per-node 8 -m fsdp_c run -m my_package.train --lr 0.1
  python -m fsdp_c plan my_package.model:GPT --world-size 64 --wrap Block --param-dtype bfloat16

A SCRIPT in the place of the command is run. What follows SCRIPT or MODULE is passed on to it.
`python -m fsdp_c COMMAND --help` says more; for checkpoints there is `python -m fsdp_c.checkpoint`."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status. SystemExit with status 2 for arguments that are not understood."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    if argv and Path(argv[0]).is_file():
        return run(argv)
    parser = _parser(
        "", description=__doc__, epilog=EPILOG, usage="%(prog)s COMMAND ... | SCRIPT [ARGUMENT ...]"
    )
    if argv and not argv[0].startswith("-"):
        parser.error(f"{argv[0]!r} is neither a command ({', '.join(COMMANDS)}) nor a file that can be run")
    parser.parse_args(argv)
    parser.error("name a command or a script")


def _parser(
    command: str, description: str | None, epilog: str | None = None, usage: str | None = None
) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        f"python -m fsdp_c {command}".strip(),
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(argv: Sequence[str]) -> int:
    """Run a script or a module. Its exceptions propagate."""
    parser = _parser("run", description="Run a script unmodified, with fsdp_c in the place of torch's FSDP1.")
    parser.usage = "%(prog)s SCRIPT [ARGUMENT ...] | -m MODULE [ARGUMENT ...]"
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a file")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module instead, as python -m takes it")
    own = 2 if argv and argv[0] == "-m" else 1
    args = parser.parse_args(argv[:own])
    if args.script is None and args.module is None:
        parser.error("name a SCRIPT, or -m MODULE")
    start, name = (
        (interop.run_script, args.script) if args.module is None else (interop.run_module, args.module)
    )
    try:
        start(name, list(argv[own:]))
    except (FileNotFoundError, ModuleNotFoundError) as error:
        if interop.is_installed():  # the script has started: the error is its own
            raise
        parser.error(str(error))
    return 0


# ----------------------------------------------------------------- plan

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STRATEGIES = {strategy.name.lstrip("_").lower(): strategy for strategy in ShardingStrategy}
PREFETCHES = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
DEFAULT = "(default: %(default)s)"


def plan(argv: Sequence[str]) -> int:
    """Print what wrapping would make of a model. Exceptions from building the model propagate."""
    parser = _plan_parser()
    args = parser.parse_args(argv)
    if (args.tokens is None) != (args.tflops is None) or (args.host_us and args.tokens is None):
        parser.error("--tokens and --tflops go together, and --host-us with them")
    build = _callable(args.model, parser)
    with torch.device("meta"):
        module = build()
    try:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{args.model} should return an nn.Module, but returned {type(module).__name__}")
        planned = _plan(module, args)
        print(planned)
        if args.tokens is not None:
            print(_host_bound(planned, args))
    except (NotImplementedError, TypeError, ValueError) as error:
        parser.error(str(error))
    return 0


def _plan_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "plan", description="Show what FullyShardedDataParallel would make of a model on so many ranks."
    )
    parser.add_argument(
        "model", metavar="MODULE:CALLABLE", help="called without arguments, on the meta device"
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--strategy", choices=STRATEGIES, type=str.lower, default="full_shard", help=DEFAULT)
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="hybrid strategies: ranks that shard together (no default)",
    )
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument(
        "--wrap",
        action="append",
        metavar="CLASS",
        help="a unit for each module of this class name (default: one unit)",
    )
    policy.add_argument(
        "--min-numel", type=int, metavar="N", help="units of at least so many elements (default: one unit)"
    )
    parser.add_argument(
        "--param-dtype", choices=DTYPES, help="computes in another dtype (default: the parameters')"
    )
    parser.add_argument(
        "--reduce-dtype", choices=DTYPES, help="reduces gradients in another dtype (default: what computes)"
    )
    parser.add_argument("--use-orig-params", action="store_true", help="(default: False)")
    parser.add_argument("--backward-prefetch", choices=PREFETCHES, default="pre", help=DEFAULT)
    parser.add_argument("--forward-prefetch", action="store_true", help="(default: False)")
    parser.add_argument(
        "--backward-prefetch-limit", type=int, default=1, metavar="N", help=f"units prefetched {DEFAULT}"
    )
    parser.add_argument(
        "--forward-prefetch-limit", type=int, default=1, metavar="N", help=f"units prefetched {DEFAULT}"
    )
    parser.add_argument(
        "--reshard-after-forward",
        type=int,
        metavar="N",
        help="backwards gather within so many ranks, those of a node",
    )
    parser.add_argument("--cpu-offload", action="store_true", help="shards are in CPU memory")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="of a rank's batch: say which units wait for the host"
    )
    parser.add_argument("--tflops", type=float, metavar="N", help="that a device really does, for --tokens")
    parser.add_argument(
        "--host-us",
        type=float,
        nargs=2,
        metavar=("UNIT", "PARAMETER"),
        help="what each takes of the host in a step, as python -m fsdp_c.host_cost says (default: measured here)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where the ranks will compute (default: as here)"
    )
    return parser


def _callable(text: str, parser: argparse.ArgumentParser) -> Callable[[], Any]:
    module, separator, names = text.partition(":")
    if not (module and separator and names):
        parser.error(f"{text!r} is not MODULE:CALLABLE, as in my_package.model:GPT")
    if not interop.module_exists(module):
        parser.error(f"no module {module!r} here: start where it can be imported, or set PYTHONPATH")
    try:
        found = functools.reduce(getattr, names.split("."), importlib.import_module(module))
    except AttributeError as error:
        parser.error(str(error))
    if not callable(found):
        parser.error(f"{text} is {type(found).__name__}, which cannot be called: name a class or function")
    return found


def _plan(module: nn.Module, args: argparse.Namespace) -> Summary:
    precision = MixedPrecision(
        param_dtype=DTYPES.get(args.param_dtype), reduce_dtype=DTYPES.get(args.reduce_dtype)
    )
    return plan_of(
        module,
        world_size=args.world_size,
        strategy=STRATEGIES[args.strategy],
        auto_wrap_policy=_policy(module, args.wrap, args.min_numel),
        mixed_precision=precision if args.param_dtype or args.reduce_dtype else None,
        use_orig_params=args.use_orig_params,
        backward_prefetch=PREFETCHES[args.backward_prefetch],
        forward_prefetch=args.forward_prefetch,
        ranks_per_node=args.ranks_per_node,
        cpu_offload=CPUOffload(args.cpu_offload),
        device_type=args.device,
        backward_prefetch_limit=args.backward_prefetch_limit,
        forward_prefetch_limit=args.forward_prefetch_limit,
        reshard_after_forward=args.reshard_after_forward,
    )


def _host_bound(planned: Summary, args: argparse.Namespace) -> str:
    cost = host_cost.measure() if args.host_us is None else host_cost.HostCost(*args.host_us)
    bound = planned.host_bound(cost, tokens=args.tokens, flops=args.tflops * 1e12)
    text = f"with {args.tokens:,} tokens per rank at {args.tflops:g} TFLOP/s, {bound}"
    return textwrap.fill(text, TEXT_WIDTH)


def _policy(module: nn.Module, names: Sequence[str] | None, min_numel: int | None) -> Policy | None:
    if min_numel is not None:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=min_numel)
    if not names:
        return None
    classes = {type(submodule) for submodule in module.modules()}
    known = {kind.__name__ for kind in classes}
    for name in names:
        if name not in known:
            raise ValueError(f"--wrap {name}: no module of that class, there are {', '.join(sorted(known))}")
    return ModuleWrapPolicy({kind for kind in classes if kind.__name__ in names})


# ----------------------------------------------------------------- env


def env(argv: Sequence[str]) -> int:
    """Print the versions and devices that fsdp_c finds."""
    _parser(
        "env", description="Show versions, what was found, and which kernels are used: for reports."
    ).parse_args(argv)
    print(environment.report())
    return 0


# ----------------------------------------------------------------- selftest


def selftest(argv: Sequence[str]) -> int:
    """Try what fsdp_c promises, on this rank of torchrun or ranks started here. 1 if anything failed."""
    parser = _parser(
        "selftest", description="Try fsdp_c on this machine, beside torch's FSDP1 and FSDP2: some minutes."
    )
    parser.add_argument(
        "--device", metavar="TYPE", help="as in cuda or cpu (default: the accelerator that is here)"
    )
    parser.add_argument("--width", type=int, default=512, metavar="N", help=f"of the model {DEFAULT}")
    args = parser.parse_args(argv)
    from fsdp_c import selftest  # it brings optimizers and checkpoints with it

    return selftest.main(args.device, args.width)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "plan": plan,
    "env": env,
    "selftest": selftest,
}
