"""Whether a checkpoint is whole: every byte that a checksum covers, part by part."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from fsdp_c.checkpoint.folder import LAYOUT, METADATA, CheckpointError
from fsdp_c.checkpoint.metadata import Checkpoint, TensorEntry, framing_gaps
from fsdp_c.checkpoint.storage import read_chunk, read_object

_READ_NBYTES = 2**20


def verify_checkpoint(checkpoint: Checkpoint) -> Iterator[str]:
    """What is wrong, in words. Memory: one piece. Without checksums: what cannot be read."""
    for key, entry in checkpoint.entries.items():
        try:
            if isinstance(entry, TensorEntry):
                for chunk in entry.chunks:
                    with checkpoint.open(chunk.file) as file:
                        read_chunk(checkpoint, key, chunk, file)
            else:
                read_object(checkpoint, key)
        except (CheckpointError, OSError) as error:
            yield str(error)
    for name, gaps in framing_gaps(checkpoint):
        if _crc32_of(checkpoint, name, gaps) != checkpoint.framing[name]:
            path = checkpoint.folder / name
            outside = "damaged outside of the tensors' data: torch may not read it"
            yield f"{path}: {f'damaged: loads read {METADATA} in its place' if path.name == LAYOUT else outside}"


def _crc32_of(checkpoint: Checkpoint, name: str, ranges: list[tuple[int, int]]) -> int:
    crc32 = 0
    with checkpoint.open(name) as file:
        for start, end in ranges:
            file.seek(start)
            while start < end:
                content = file.read(min(_READ_NBYTES, end - start))
                if not content:
                    return -1
                crc32 = zlib.crc32(content, crc32)
                start += len(content)
    return crc32
