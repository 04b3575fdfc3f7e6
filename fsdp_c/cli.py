"""python -m fsdp_c: run a script with fsdp_c in place of torch's FSDP1, or inspect this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_c.compat import scripts
from fsdp_c.tools import environment

SPLIT_FROZEN = "--split-frozen"
EPILOG = """\
commands:
  run SCRIPT [ARGUMENT ...]       run a script that uses torch.distributed.fsdp, unmodified
  run -m MODULE [ARGUMENT ...]    the same for a module
  env                             show versions, libraries and the kernels in use, for bug reports
  selftest                        test kernels, training compared with torch's FSDP1, and a checkpoint

  torchrun --nproc-per-node 8 -m fsdp_c train.py --lr 0.1
  torchrun --nproc-per-node 8 -m fsdp_c run -m my_package.train --lr 0.1

A SCRIPT instead of a command is run. Arguments after SCRIPT or MODULE are passed on to it. Before either,
--split-frozen gives frozen parameters flat parameters of their own, like fsdp_c.wrap.split_frozen().
`python -m fsdp_c COMMAND --help` shows details; `python -m fsdp_c.checkpoint` is the tool for checkpoints."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. Raises SystemExit with status 2 for invalid arguments."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    if argv and (argv[0] == SPLIT_FROZEN or Path(argv[0]).is_file()):
        return run(argv)
    parser = _parser("", __doc__, epilog=EPILOG, usage="%(prog)s COMMAND ... | SCRIPT [ARGUMENT ...]")
    if argv and not argv[0].startswith("-"):
        parser.error(f"{argv[0]!r} is neither a command ({', '.join(COMMANDS)}) nor a file that can be run")
    parser.parse_args(argv)
    parser.error("name a command or a script")


def _parser(command: str, description: str | None, **options: Any) -> argparse.ArgumentParser:
    name, kind = f"python -m fsdp_c {command}".strip(), argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(name, description=description, formatter_class=kind, **options)


def run(argv: list[str]) -> int:
    """Run a script or module; return 0. Exceptions of the script propagate."""
    parser = _parser("run", "Run a script unmodified, with fsdp_c instead of torch's FSDP1.")
    parser.usage = "%(prog)s [--split-frozen] SCRIPT [ARGUMENT ...] | -m MODULE [ARGUMENT ...]"
    parser.add_argument(SPLIT_FROZEN, action="store_true", help="flatten frozen parameters separately")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a file")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, like python -m")
    flags = int(argv[:1] == [SPLIT_FROZEN])
    own = flags + (2 if argv[flags : flags + 1] == ["-m"] else 1)
    args = parser.parse_args(argv[:own])
    if args.module is not None:
        if not scripts.module_exists(args.module):
            parser.error(f"no module {args.module!r} to run")
        scripts.run_module(args.module, argv[own:], args.split_frozen)
    elif args.script is not None:
        if not Path(args.script).is_file():
            parser.error(f"no script {args.script!r} to run")
        scripts.run_script(args.script, argv[own:], args.split_frozen)
    else:
        parser.error("name a SCRIPT, or -m MODULE")
    return 0


def env(argv: list[str]) -> int:
    """Print the versions and devices that fsdp_c finds."""
    _parser("env", "Show versions, libraries and the kernels in use, for bug reports.").parse_args(argv)
    print(environment.report())
    return 0


def selftest(argv: list[str]) -> int:
    """Run the self-test on this rank of torchrun, or on ranks started here. Return 1 for any failure."""
    parser = _parser("selftest", "Test fsdp_c on this machine, and compare it with torch's FSDP1.")
    parser.add_argument("--device", metavar="TYPE", help="cuda or cpu (default: the accelerator, if any)")
    parser.add_argument("--width", type=int, default=512, metavar="N", help="model width (%(default)s)")
    args = parser.parse_args(argv)
    from fsdp_c import selftest  # lazy: imports optimizers and checkpoints

    return selftest.main(args.device, args.width)


COMMANDS: dict[str, Callable[[list[str]], int]] = {"run": run, "env": env, "selftest": selftest}
