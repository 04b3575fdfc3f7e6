"""The shapes of the models that benchmarks.timeline and its neighbours run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A Llama."""

    width: int
    hidden: int
    heads: int
    blocks: int
    sequence: int
    vocabulary: int = 32000


MODELS = {
    "0.4B": Model(1024, 2816, 16, 24, 1024),
    "1.3B": Model(2048, 5504, 16, 24, 2048),
    "6.7B": Model(4096, 11008, 32, 32, 4096),
}
