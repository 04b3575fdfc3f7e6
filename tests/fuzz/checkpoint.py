"""Mutated checkpoints: each is refused with a CheckpointError, or read; none crashes, hangs, or takes memory.

    python -m tests.fuzz.checkpoint --count 20000
    python -m tests.fuzz.checkpoint --only headers-alone --count 1000000
    python -m tests.fuzz.checkpoint --only pieces-alone --count 1000000

A trial follows from the seed and its number, so that ``--first N --count 1`` repeats trial N. In ``pieces`` the files
have checksums of what they were before, so that only what was saved may be loaded.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import random
import resource
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_c import checkpoint
from fsdp_c.checkpoint import CheckpointError
from fsdp_c.checkpoint.folder import CHECKSUMS, METADATA
from fsdp_c.checkpoint.formats import open_source
from fsdp_c.checkpoint.metadata import BytesEntry, checksums_content, read_checkpoint
from fsdp_c.checkpoint.pieces import Place, read_data

SECONDS_OF_A_TRIAL = 20
MEMORY_OF_ALL = 2**29
NUMBERS = [-1, 0, 1, 2, 5, 24, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, True]
VALUES = [*NUMBERS, None, "", "x", "..", "/etc/passwd", b"", 0.5, (), (0,), (2, 3), [], [2**40, 2**40], {}, torch.int8]


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    (model[0].weight.sum() + model[1].weight.sum()).backward()
    optimizer.step()
    return model, optimizer


# ----------------------------------------------------------------- mutations


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A few bytes, or a slice, changed."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        length = rng.choice([1, 1, 2, 4, 8, rng.randrange(64)])
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = rng.choice(NUMBERS) % 2 ** (8 * max(length, 1))
            data[at : at + length] = number.to_bytes(max(length, 1), rng.choice(["little", "big"]))
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = rng.randbytes(length)
        elif kind == 4:
            source = rng.randrange(len(data) + 1)
            data[at : at + length] = data[source : source + length]
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)


def leaves(metadata: Any) -> list[tuple[Callable[[Any], None], Any]]:
    """Setters of what a checkpoint's metadata say, with the values."""
    found: list[tuple[Callable[[Any], None], Any]] = []

    def attribute(owner: Any, name: str) -> None:
        found.append((lambda value: object.__setattr__(owner, name, value), getattr(owner, name, None)))

    for name in ("state_dict_metadata", "planner_data", "storage_data"):
        attribute(metadata, name)
        table = getattr(metadata, name)
        found.extend(
            (lambda value, table=table, key=key: table.update({key: value}), old) for key, old in table.items()
        )
    for entry in metadata.state_dict_metadata.values():
        for owner in [entry, *getattr(entry, "chunks", [])]:
            for name in vars(owner):
                attribute(owner, name)
    for index, info in metadata.storage_data.items():
        for owner in (index, info):
            for name in vars(owner):
                attribute(owner, name)
    return found


def changed(metadata: Any, rng: random.Random) -> bytes:
    """Pickled with values replaced by odd ones, or by those of others."""
    places = leaves(metadata)
    for _ in range(rng.choice([1, 1, 2, 3])):
        put, old = rng.choice(places)
        value = rng.choice([rng.choice(VALUES), rng.choice(places)[1]])
        if isinstance(old, (tuple, list)) and old and rng.random() < 0.6:
            odd = list(old)
            odd[rng.randrange(len(odd))] = rng.choice(VALUES)
            value = type(old)(odd) if type(old) in (tuple, list) else tuple(odd)
        try:
            put(value)
        except Exception:
            continue  # some cannot be put there
    return pickle.dumps(metadata)


# ----------------------------------------------------------------- subjects


class Subject:
    """A folder with a sound checkpoint, of which each trial changes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.make()
        self.sound = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def make(self) -> None:
        raise NotImplementedError

    def change(self, rng: random.Random) -> str:
        """Change a file; its name."""
        name = rng.choice(sorted(self.sound))
        (self.folder / name).write_bytes(mutated(self.sound[name], rng))
        return name

    def restore(self) -> None:
        for name, content in self.sound.items():
            (self.folder / name).write_bytes(content)

    def read(self) -> None:
        source = open_source(self.folder)
        for key in source.entries:
            source.read(key)
        list(source.problems())


class Pieces(Subject):
    """Any file of ours, with the checksums as they were."""

    def make(self) -> None:
        model, optimizer = plain()
        checkpoint.save(model, optimizer, self.folder, extra={"list": [1, torch.ones(2)]})
        self.expected = self.values()

    def values(self) -> list[Any]:
        model, optimizer = plain()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(-7)
        extra = checkpoint.load(model, optimizer, self.folder)
        state = optimizer.state_dict()["state"]
        return [*model.state_dict().values(), *(s["momentum_buffer"] for s in state.values()), extra["list"][1]]

    def read(self) -> None:
        assert all(torch.equal(one, other) for one, other in zip(self.values(), self.expected, strict=True)), "wrong"


class Headers(Subject):
    """The metadata, with the right checksum, so that what they say is read."""

    def make(self) -> None:
        checkpoint.save(*plain(), self.folder, extra={"list": [1, torch.ones(2)]})
        files = json.loads((self.folder / CHECKSUMS).read_bytes())["files"]
        self.files = {name: (i["size"], i["framing_crc32"]) for name, i in files.items() if name != METADATA}

    def change(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            content = mutated(self.sound[METADATA], rng)
        else:
            content = changed(pickle.loads(self.sound[METADATA]), rng)
        (self.folder / METADATA).write_bytes(content)
        (self.folder / CHECKSUMS).write_bytes(checksums_content(content, self.files))
        return METADATA


class HeadersAlone(Headers):
    """The same without the data behind: a hundred times as many in the same time."""

    def restore(self) -> None:
        for name in (METADATA, CHECKSUMS):
            (self.folder / name).write_bytes(self.sound[name])

    def read(self) -> None:
        read_checkpoint(self.folder)


class PiecesAlone(Subject):
    """The data of each entry in a file of ours, read from memory: what was saved, or damaged."""

    def make(self) -> None:
        checkpoint.save(*plain(), self.folder, extra={"list": [1, torch.ones(2)]})
        self.pieces: dict[str, list[tuple[Place, bytes]]] = {}
        for entry in read_checkpoint(self.folder).entries.values():
            for part in [entry] if isinstance(entry, BytesEntry) else entry.chunks:
                assert part.place is not None
                data = (self.folder / part.file).read_bytes()[part.place.offset :][: part.place.nbytes]
                self.pieces.setdefault(part.file, []).append((part.place, data))

    def change(self, rng: random.Random) -> str:
        self.name = rng.choice(sorted(self.pieces))
        self.content = mutated(self.sound[self.name], rng)
        return self.name

    def restore(self) -> None:
        pass

    def read(self) -> None:
        damaged = 0
        for place, data in self.pieces[self.name]:
            target = bytearray(len(data))
            if read_data(io.BytesIO(self.content), place, memoryview(target)):
                assert target == data, "wrong"
            else:
                damaged += 1
        if damaged:
            raise CheckpointError(f"{damaged} pieces of {self.name} are damaged")


class HeadersOfTorch(Headers):
    """The metadata or the data of a checkpoint that torch wrote, without checksums."""

    def make(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": plain()[0].state_dict(), "note": [1, "x"]}, checkpoint_id=self.folder, no_dist=True)

    def change(self, rng: random.Random) -> str:
        if rng.random() < 0.4:
            (self.folder / METADATA).write_bytes(changed(pickle.loads(self.sound[METADATA]), rng))
            return METADATA
        return Subject.change(self, rng)


class Safetensors(Subject):
    def make(self) -> None:
        self.folder.mkdir()
        places = {"a": [0, 24], "b": [24, 48]}
        header = {key: {"dtype": "F32", "shape": [2, 3], "data_offsets": at} for key, at in places.items()}
        content = json.dumps(header).encode()
        data = len(content).to_bytes(8, "little") + content + bytes(48)
        (self.folder / "model.safetensors").write_bytes(data)


class TorchFiles(Subject):
    """A full state dict of torch.save."""

    def make(self) -> None:
        self.folder.mkdir()
        torch.save({"model": plain()[0].state_dict(), "step": 3}, self.folder / "model.pt")


class RankFiles(Subject):
    """What each of two ranks saved of a ShardedTensor."""

    def make(self) -> None:
        self.folder.mkdir()
        for rank in range(2):
            dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
            try:
                torch.save({"a": _sharded(rank), "b": torch.ones(2)}, self.folder / f"rank{rank}.pt")
            finally:
                dist.destroy_process_group()


def _sharded(rank: int) -> Any:
    shards = [ShardMetadata([2 * at, 0], [2, 3], f"rank:{at}/cpu") for at in range(2)]
    about = ShardedTensorMetadata(shards, torch.Size([4, 3]), TensorProperties(dtype=torch.float32))
    local = [Shard(torch.ones(2, 3), shards[rank])]
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, about, dist.group.WORLD)


SUBJECTS = {
    "pieces": Pieces,
    "pieces-alone": PiecesAlone,
    "headers": Headers,
    "headers-alone": HeadersAlone,
    "torch-headers": HeadersOfTorch,
    "safetensors": Safetensors,
    "torch-files": TorchFiles,
    "rank-files": RankFiles,
}
REFUSALS = (CheckpointError, FileNotFoundError, NotADirectoryError)


def trial(subject: Subject, seed: int, number: int) -> str:
    """ "read" or "refused"; anything else that is raised is a failure."""
    name = subject.change(random.Random(f"{seed} {number}"))
    try:
        subject.read()
        return "read"
    except REFUSALS as error:
        assert str(error), f"a refusal of {name} without words"
        return "refused"
    finally:
        subject.restore()


def run(name: str, seed: int, first: int, count: int, say: Callable[[str], None] = lambda text: None) -> Counter[str]:
    """How many trials had which end. RuntimeError naming the first that failed."""
    outcomes, number = Counter[str](), first
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        subject = SUBJECTS[name](folder / "checkpoint")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(first, first + count):
            start = time.monotonic()
            outcomes[trial(subject, seed, number)] += 1
            if time.monotonic() - start > SECONDS_OF_A_TRIAL:
                raise TimeoutError(f"it took {time.monotonic() - start:.0f} s")
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak > MEMORY_OF_ALL // 1024:
                raise MemoryError(f"more than {MEMORY_OF_ALL} bytes were taken")
            if (number + 1) % 1000 == 0:
                say(f"{name}: trial {number}: {dict(outcomes)}")
    except BaseException as error:
        raise RuntimeError(f"{name}: --seed {seed} --first {number} --count 1: {error!r}") from error
    finally:
        shutil.rmtree(folder)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.fuzz.checkpoint", description=__doc__)
    parser.add_argument("--only", choices=SUBJECTS, help="one kind; default: all, in turn")
    parser.add_argument("--count", type=int, default=20_000, help="trials, of all kinds together")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = [args.only] if args.only else list(SUBJECTS)
    start = time.monotonic()
    for name in names:
        outcomes = run(name, args.seed, args.first, -(-args.count // len(names)), lambda text: print(text, flush=True))
        print(f"{name}: {dict(outcomes)}, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
