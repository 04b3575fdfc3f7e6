"""python -m fsdp_c.checkpoint: verify a checkpoint, or export its model, without a GPU and without ranks."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from fsdp_c.checkpoint.contents import BytesEntry, Checkpoint, TensorEntry
from fsdp_c.checkpoint.export import CASTS, export
from fsdp_c.checkpoint.folder import LAYOUT, CheckpointError, check_path, retry_if_replaced
from fsdp_c.checkpoint.pieces import crc32_of
from fsdp_c.checkpoint.storage import read_checkpoint, read_chunk, read_object

EPILOG = """\
PATH is a checkpoint folder of torch.distributed.checkpoint, written by fsdp_c.checkpoint.save, FSDP1 or FSDP2.
No code in a checkpoint is executed.

  python -m fsdp_c.checkpoint verify runs/lm/step-000200
  python -m fsdp_c.checkpoint export runs/lm/step-000200 exported --dtype bfloat16

Exit status: 0 success; 1 verify found damage; 2 error."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fsdp_c.checkpoint",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="read all files and compare them with their checksums")
    export = commands.add_parser("export", help="write the model as sharded safetensors with an index")
    for each in (verify, export):
        each.add_argument("path", type=Path, metavar="PATH")
    export.add_argument("target", type=Path, metavar="OUT", help="output folder, which must not exist")
    cast = "cast floating-point tensors of 16 bits and more (default: none)"
    export.add_argument("--dtype", choices=CASTS, help=cast)
    key = "the model's name in the checkpoint, as for load (default: %(default)s; '' for all tensors)"
    export.add_argument("--model-key", default="model", metavar="KEY", help=key)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status."""
    args = make_parser().parse_args(argv)
    try:
        return (_verify if args.command == "verify" else _export)(args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (CheckpointError, OSError, ValueError) as error:
        _print(f"error: {error}", file=sys.stderr)
        if isinstance(error, CheckpointError) and args.command == "verify":
            return 1
    except (RuntimeError, MemoryError) as error:  # raised by torch, without the path
        _print(f"error: {args.path}: {(str(error) or 'out of memory').splitlines()[0]}", file=sys.stderr)
    except Exception:  # a bug; status 1 would report the checkpoint as damaged
        traceback.print_exc()
    return 2


def _print(text: str, file: TextIO | None = None) -> None:
    """Print a line. Control characters are escaped like in repr(), so that a terminal does not interpret them."""
    print("".join(each if each.isprintable() else repr(each)[1:-1] for each in text), file=file)


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint ``path`` with its files open, so that a save to its place does not disturb the reader."""

    def opened() -> Checkpoint:
        checkpoint = read_checkpoint(path)
        checkpoint.keep_open(checkpoint.sizes)
        return checkpoint

    check_path(path)
    return retry_if_replaced(path, opened)


def _verify(args: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(args.path)
    count = 0
    for problem in problems(checkpoint):
        count += 1
        _print(problem)
    writer = "fsdp_c, with checksums" if checkpoint.footer else "torch, without checksums"
    nbytes = sum(entry.nbytes for entry in checkpoint.entries.values() if isinstance(entry, TensorEntry))
    _print(
        f"{args.path}: written by {writer}: {len(checkpoint.sizes)} files, {len(checkpoint.entries)} entries, "
        f"{nbytes} bytes: {count or 'no'} problems"
    )
    return 1 if count else 0


def problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Read everything, one piece at a time, and yield each damage; without checksums, each unreadable part."""
    data: dict[str, set[tuple[int, int]]] = {}
    for key, entry in checkpoint.entries.items():
        for part in entry.chunks if isinstance(entry, TensorEntry) else [entry]:
            data.setdefault(part.file, set()).add((part.start, part.start + part.nbytes))
            try:
                if isinstance(part, BytesEntry):
                    read_object(checkpoint, key, part)
                else:
                    read_chunk(checkpoint, key, part)
            except (CheckpointError, OSError) as error:
                yield str(error)
    if (footer := checkpoint.footer) is None:
        return
    for name, (size, framing_crc32) in footer.files.items():
        if name == LAYOUT:  # compared when it was opened
            continue
        path, crc32, last = f"{footer.data}/{name}", 0, 0
        with checkpoint.open(path) as file:
            for start, end in [*sorted(data.get(path, ())), (size, size)]:
                crc32, last = crc32_of(file, last, start, crc32), max(last, end)
        if crc32 != framing_crc32:
            yield f"{checkpoint.folder / path}: damaged outside of the tensors' data: torch may not read it"


def _export(args: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(args.path)
    tensors, files = export(checkpoint, args.target, CASTS.get(args.dtype), args.model_key)
    others = len(checkpoint.entries) - tensors
    _print(f"{args.target}: {tensors} tensors in {files} files; left out: {others} other entries")
    return 0
