"""The shapes of the models in benchmarks.timeline and the benchmarks that use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The shape of a Llama or an MPT."""

    width: int
    hidden: int
    heads: int
    blocks: int
    sequence: int
    vocabulary: int = 32000
    kv_heads: int = 0  # heads of keys and values; 0: as many as of queries
    family: str = "llama"
    in_fp32: bool = False  # norms, rotary positions and loss in fp32, as in torchtitan
    experts: int = 0  # feed-forward networks per block; each token is routed to two

    @property
    def nbytes(self) -> int:
        """Approximate bytes of the blocks' matrices in fp32."""
        matrices = 3 * max(self.experts, 1) if self.family == "llama" else 2
        return 4 * self.blocks * self.width * (4 * self.width + matrices * self.hidden)


def mpt(width: int, heads: int, blocks: int) -> Model:
    return Model(width, 4 * width, heads, blocks, 2048, 50368, family="mpt")


SMALL_TO_LARGE = {
    "0.4B": Model(1024, 2816, 16, 24, 1024),
    "1.3B": Model(2048, 5504, 16, 24, 2048),
    "6.7B": Model(4096, 11008, 32, 32, 4096),
}
MODELS = SMALL_TO_LARGE | {
    "llama2-7b": Model(4096, 11008, 32, 32, 4096),
    "llama2-13b": Model(5120, 13824, 40, 40, 4096),
    "llama3-8b": Model(4096, 14336, 32, 32, 8192, 128256, kv_heads=8),
    "titan-7b": Model(4096, 11008, 32, 32, 2048, in_fp32=True),
    "titan-13b": Model(5120, 13824, 40, 40, 4096, in_fp32=True),
    "titan3-8b": Model(4096, 14336, 32, 32, 8192, 128256, kv_heads=8, in_fp32=True),
    "mixtral-8x7b": Model(4096, 14336, 32, 32, 4096, kv_heads=8, experts=8),
    "mpt-1b": mpt(2048, 16, 24),
    "mpt-3b": mpt(2560, 20, 32),
    "mpt-7b": mpt(4096, 32, 32),
    "mpt-13b": mpt(5120, 40, 40),
    "mpt-30b": mpt(7168, 56, 48),
    "mpt-70b": mpt(8192, 64, 80),
}
