"""Training text as bytes: loading, split, and the batches of each step."""

import math
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_FRACTION = 0.05
MAX_NBYTES = 64 << 20


class InputError(Exception):
    """Unusable input from the user. The message names the reason and a remedy."""


@dataclass(frozen=True)
class Text:
    """A text split in two: training and held-out, each uint8 and 1-D."""

    source: str
    train: Tensor
    held_out: Tensor
    checksum: int

    def unigram_entropy(self) -> float:
        """Return the unigram entropy of the held-out text in nats per byte, a lower bound for models that
        ignore the context.
        """
        counts = torch.bincount(self.held_out.long(), minlength=256).double()
        p = counts[counts > 0] / counts.sum()
        return float(-(p * p.log()).sum())


def load_text(path: str | None, context: int) -> Text:
    """Load the text of a file or folder; by default the source of Python's standard library. Raises
    InputError if the text is unusable.
    """
    source, files = (str(path), files_of(Path(path))) if path else standard_library()
    content = read_all(files)
    needed = math.ceil((context + 2) / HELD_OUT_FRACTION)
    if len(content) < needed:
        found = f"{len(content)} bytes" if content else "no text"
        raise InputError(f"{source}: {found}; at least {needed} bytes are needed with a context of {context}")
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    split = len(content) - int(len(content) * HELD_OUT_FRACTION)
    return Text(source, data[:split], data[split:], zlib.crc32(content))


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or the files of a folder, except hidden ones and those in hidden folders."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder")
    return [file for file in path.rglob("*") if file.is_file() and not is_hidden(file.relative_to(path))]


def is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def standard_library() -> tuple[str, list[Path]]:
    """Return the source files of the running Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [file for file in root.rglob("*.py") if not skipped.intersection(file.relative_to(root).parts)]
    return f"the standard library's source ({root})", files


def read_all(files: Iterable[Path]) -> bytes:
    """Concatenate the text files in an order that mixes folders and is equal on every machine."""
    content = bytearray()
    for file in sorted(files, key=lambda file: (zlib.crc32(file.name.encode()), str(file))):
        try:
            text = file.read_bytes()
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from error
        if b"\0" not in text[:4096]:
            content += text
        if len(content) >= MAX_NBYTES:
            break
    return bytes(content[:MAX_NBYTES])


@dataclass(frozen=True)
class Batches:
    """Batches of this rank. Batches depend only on the step, so that a resumed run sees the same batches."""

    text: Text
    context: int
    batch: int
    seed: int
    rank: int
    world_size: int

    def training(self, step: int, micro_steps: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's (inputs, targets) of one step, each (batch, context)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        shape = (micro_steps, self.world_size, self.batch)
        starts = torch.randint(len(self.text.train) - self.context, shape, generator=generator)
        return [self.cut(self.text.train, row[self.rank]) for row in starts]

    def evaluation(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's ``count`` batches of the held-out text. The batches of all ranks are spread
        evenly over it.
        """
        last = len(self.text.held_out) - self.context - 1
        starts = torch.linspace(0, last, count * self.world_size * self.batch).long()
        for row in starts.view(count, self.world_size, self.batch):
            yield self.cut(self.text.held_out, row[self.rank])

    def cut(self, data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows that begin at ``starts``, and the same windows shifted by one byte."""
        windows = data[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]
