"""python -m fsdp_c.checkpoint: look at checkpoints, verify, convert and compare them; no GPU, no ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from fsdp_c.checkpoint.converting import MAX_RANKS, format_of, open_sink
from fsdp_c.checkpoint.folder import CheckpointError
from fsdp_c.checkpoint.formats import FORMATS, open_source
from fsdp_c.checkpoint.planning import path_below
from fsdp_c.checkpoint.rank_files import is_flat
from fsdp_c.checkpoint.storage import Info, Source
from fsdp_c.checkpoint.torch_files import NamedSource, RankFilesSource, TorchSource

EPILOG = """\
PATH is a folder of torch.distributed.checkpoint (of fsdp_c.checkpoint.save, torch's FSDP1 and FSDP2), a file of
torch.save with a full state dict, a folder of files (.pt, .pth, .bin) in which each rank saved its sharded or local
state dict with torch.save, a safetensors file, or a folder of them. Nothing in a checkpoint is executed.

  python -m fsdp_c.checkpoint inspect runs/lm/step-000200
  python -m fsdp_c.checkpoint verify runs/lm/step-000200
  python -m fsdp_c.checkpoint convert runs/lm/step-000200 model.safetensors --dtype bfloat16
  python -m fsdp_c.checkpoint convert model.safetensors sharded --ranks 8
  python -m fsdp_c.checkpoint convert local full.pt --like model.pt
  python -m fsdp_c.checkpoint diff before after --tolerance 1e-6

Exit status: 0 all is well (diff: no difference); 1 verify found damage, diff a difference; 2 trouble."""
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_DIFF_NUMEL = 2**20
_MODEL = "model"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fsdp_c.checkpoint",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="list what a checkpoint holds")
    inspect.add_argument("path", type=Path, metavar="PATH")
    inspect.add_argument(
        "--select", metavar="NAME", help="only what is below NAME, as in model or optim.state (default: all)"
    )
    inspect.add_argument("--values", action="store_true", help="also show what is no tensor")
    inspect.add_argument("--json", action="store_true", help="for programs")

    verify = commands.add_parser("verify", help="read everything and compare it with its checksums")
    verify.add_argument("path", type=Path, metavar="PATH")

    convert = commands.add_parser(
        "convert", help="write a checkpoint in another format, dtype or number of parts"
    )
    convert.add_argument("path", type=Path, metavar="PATH")
    convert.add_argument("target", type=Path, metavar="TARGET")
    convert.add_argument(
        "--to", choices=FORMATS, help="default: by TARGET's suffix (.safetensors, .pt), else dcp"
    )
    convert.add_argument(
        "--ranks",
        type=_ranks,
        default=1,
        help="dcp: as many files as so many ranks would write (default: %(default)s)",
    )
    convert.add_argument(
        "--dtype", choices=DTYPES, help="cast floating-point tensors, but for single numbers (default: none)"
    )
    convert.add_argument(
        "--select",
        metavar="NAME",
        help="only what is below NAME, which is left out of the names "
        "(default: model, where TARGET is safetensors and there is one; otherwise everything)",
    )
    convert.add_argument(
        "--under", metavar="NAME", help="put NAME before all names (default: model, from safetensors to dcp)"
    )
    convert.add_argument(
        "--like",
        type=Path,
        metavar="FILE",
        help="divide the flat parameters of LOCAL_STATE_DICT into those of the model whose state_dict(), unwrapped, "
        "torch.save wrote to FILE; its values do not matter, so the model may be on the meta device",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace TARGET")

    diff = commands.add_parser("diff", help="compare two checkpoints, of any formats")
    diff.add_argument("path", type=Path, metavar="PATH")
    diff.add_argument("other", type=Path, metavar="OTHER")
    diff.add_argument(
        "--select", metavar="NAME", help="only what is below NAME in PATH, and in OTHER if it has NAME"
    )
    diff.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        help="largest absolute difference that is none (default: %(default)s)",
    )
    return parser


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MAX_RANKS}")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = make_parser().parse_args(argv)
    try:
        return COMMANDS[args.command](args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (CheckpointError, OSError, ValueError) as error:
        _say(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        why = (
            "more memory is needed than there is"
            if isinstance(error, MemoryError)
            else str(error).split("\n")[0]
        )
        _say(f"error: {args.path}: {why}", file=sys.stderr)
        return 2
    except Exception:  # a bug; 1 would say that the checkpoint is damaged
        traceback.print_exc()
        return 2


def _say(text: str, file: TextIO | None = None) -> None:
    """Print a line. What a terminal would take for a command, or hide, is written as in Python."""
    print("".join(each if each.isprintable() else repr(each)[1:-1] for each in text), file=file)


# ----------------------------------------------------------------- names


def selected(source: Source, name: str | None) -> dict[str, tuple[str, Info]]:
    """By the name that is left, the key and what is there. Raises ValueError for nothing."""
    if not name:
        return {key: (key, info) for key, info in source.entries.items()}
    found: dict[str, tuple[str, Info]] = {}
    for key, info in source.entries.items():
        if key.startswith(f"{name}."):
            rest = path_below(info.path, name)
            if not rest or not isinstance(rest[0], str):
                rest = (key.removeprefix(f"{name}."),)
            found[key.removeprefix(f"{name}.")] = (key, info._replace(path=rest))
    if not found:
        tops = sorted({key.split(".")[0] for key in source.entries})
        raise ValueError(f"nothing is named {name}; there is {', '.join(tops[:10]) or 'nothing at all'}")
    return found


def _has(source: Source, name: str) -> bool:
    return any(key.startswith(f"{name}.") for key in source.entries)


# ----------------------------------------------------------------- inspect and verify


def _inspect(args: argparse.Namespace) -> int:
    source = open_source(args.path)
    entries = {key: info for key, info in selected(source, args.select).values()}
    if args.json:
        told = {
            key: {"dtype": _dtype(info), "shape": info.shape} if info.is_tensor else {}
            for key, info in entries.items()
        }
        print(json.dumps({"format": source.kind, "entries": told}, indent=1))
        return 0
    tensors = [info for info in entries.values() if info.is_tensor]
    total = sum(info.nbytes for info in tensors)
    _say(f"{args.path}: {source.kind}")
    _say(f"{len(tensors)} tensors, {_size(total)}; {len(entries) - len(tensors)} other values")
    width = max((len(key) for key in entries), default=0)
    for key, info in sorted(entries.items()):
        if info.is_tensor:
            _say(f"{key:{width}}  {_dtype(info)} {list(info.shape or ())}")
        elif args.values:
            _say(f"{key:{width}}  {_short(source.read(key))}")
    return 0


def _dtype(info: Info) -> str:
    return str(info.dtype).removeprefix("torch.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _verify(args: argparse.Namespace) -> int:
    source = open_source(args.path)
    problems = 0
    for problem in source.problems():
        problems += 1
        _say(problem)
    total = _size(sum(info.nbytes for info in source.entries.values()))
    _say(f"{args.path}: {source.kind}: {len(source.entries)} entries, {total}: {problems or 'no'} problems")
    return 1 if problems else 0


# ----------------------------------------------------------------- convert


def _convert(args: argparse.Namespace) -> int:
    source = _named(open_source(args.path), args.like) if args.like else open_source(args.path)
    kind = args.to or format_of(args.target)
    if args.ranks != 1 and kind != "dcp":
        raise ValueError(f"--ranks {args.ranks}: a {kind} file is one file")
    tensors_only = kind == "safetensors"
    select = args.select if args.select or not (tensors_only and _has(source, _MODEL)) else _MODEL
    from_safetensors = all(info.path == (key,) and info.is_tensor for key, info in source.entries.items())
    under = args.under
    if under is None and kind == "dcp" and source.kind.startswith("safetensors") and from_safetensors:
        under = _MODEL
    wanted = selected(source, select)
    dropped = [key for key, info in wanted.values() if tensors_only and not info.is_tensor]
    left_out = len(source.entries) - len(wanted)
    entries = {
        (f"{under}.{name}" if under else name): (key, _converted(info, under, args.dtype))
        for name, (key, info) in wanted.items()
        if key not in dropped
    }
    infos = {name: info for name, (_, info) in entries.items()}
    with open_sink(args.target, kind, infos, args.ranks, args.overwrite) as sink:
        for name, (key, info) in entries.items():
            value = source.read(key)
            sink.add(name, info, value.to(info.dtype) if isinstance(value, Tensor) else value)
    _say(
        f"{args.target}: {kind}, {len(entries)} entries, {_size(sum(info.nbytes for info in infos.values()))}"
    )
    if dropped or left_out:
        _say(
            f"left out: {left_out} entries not below {select!r}, {len(dropped)} that are no tensors",
            file=sys.stderr,
        )
    return 0


def _named(source: Source, path: Path) -> Source:
    """``source`` with parameters of the model ``path`` in place of flat ones."""
    if not isinstance(source, RankFilesSource) or not any(map(is_flat, source.entries)):
        raise ValueError(f"--like {path}: for flat parameters (LOCAL_STATE_DICT), and there are none")
    like = open_source(path)
    if not isinstance(like, TorchSource):
        raise ValueError(
            f"--like {path}: a file of torch.save is needed, which keeps the order of parameters"
        )
    return NamedSource(source, like, f"{_MODEL}." if _has(source, _MODEL) and not _has(like, _MODEL) else "")


def _converted(info: Info, under: str | None, dtype: str | None) -> Info:
    path = (*under.split("."), *info.path) if under else info.path
    casts = dtype is not None and info.dtype is not None and info.dtype.is_floating_point and info.shape
    return info._replace(path=path, dtype=DTYPES[dtype] if casts and dtype else info.dtype)


# ----------------------------------------------------------------- diff


def _diff(args: argparse.Namespace) -> int:
    left, right = open_source(args.path), open_source(args.other)
    ours = selected(left, args.select)
    theirs = selected(right, args.select if args.select and _has(right, args.select) else None)
    differences = 0
    for name in sorted({*ours, *theirs}):
        if name not in theirs or name not in ours:
            found: str | None = f"only in {args.path if name in ours else args.other}"
        else:
            found = _difference(left.read(ours[name][0]), right.read(theirs[name][0]), args.tolerance)
        if found:
            differences += 1
            _say(f"{name}: {found}")
    return 1 if differences else 0


def _difference(left: object, right: object, tolerance: float) -> str | None:
    """In words, None for none."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        same = type(left) is type(right) and _same(left, right)
        return None if same else f"{_short(left)} and {_short(right)}"
    if torch.float4_e2m1fn_x2 in (left.dtype, right.dtype) and left.dtype == right.dtype:
        left, right = left.view(torch.uint8), right.view(torch.uint8)  # torch does not convert it
    if left.shape != right.shape:
        return f"shape {list(left.shape)} and {list(right.shape)}"
    count, largest = _largest_difference(left, right)
    of_dtype = (
        f"dtype {left.dtype} and {right.dtype}".replace("torch.", "") if left.dtype != right.dtype else ""
    )
    of_values = ""
    if largest > tolerance or largest != largest:
        of_values = f"{count} of {left.numel()} elements differ, by at most {largest:.6g}"
    return "; ".join(filter(None, [of_dtype, of_values])) or None


def _same(left: object, right: object) -> bool:
    try:
        return bool(left == right)
    except Exception:  # values that hold tensors do not compare
        return repr(left) == repr(right)


def _largest_difference(left: Tensor, right: Tensor) -> tuple[int, float]:
    """How many elements differ, and by how much at most; NaN is equal to NaN, and infinitely far else."""
    count, largest = 0, 0.0
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    lefts, rights = left.reshape(-1).split(_DIFF_NUMEL), right.reshape(-1).split(_DIFF_NUMEL)
    for ours, theirs in zip(lefts, rights, strict=True):
        a, b = ours.to(wide), theirs.to(wide)
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        if ours.dtype == theirs.dtype and not (ours.dtype.is_floating_point or ours.dtype.is_complex):
            unequal |= ours != theirs  # integers that float64 rounds
        if unequal.any():
            distance = (a - b).abs()[unequal].nan_to_num(nan=float("inf"), posinf=float("inf"))
            count += int(unequal.sum())
            largest = max(largest, float(distance.max()), 5e-324)
    return count, largest


COMMANDS = {"inspect": _inspect, "verify": _verify, "convert": _convert, "diff": _diff}
