"""Memory of steps on the simulated GPU, by torch's counters: the first step reserves enough for all others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from fsdp_c import _C
from tests.models import WIDTH
from tests.races.scenarios import SCENARIOS, STEPS, Trainer, plain, raising_in
from tests.storage import settled_nbytes

pytestmark = pytest.mark.usefixtures("one_of_four_ranks")

POOLED = [
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "bf16",
    "prefetch after",
    "no prefetch",
    "forward prefetch",
    "evaluate",
]


@pytest.mark.parametrize("name", POOLED)
def test_no_step_holds_more_storage_than_was_reserved_before_the_first(name: str) -> None:
    """The root's pool reserves as many bytes of unsharded storage at lazy initialization as are ever alive at
    once.
    """
    body, arguments = SCENARIOS[name]
    trainer = Trainer(0, net={"blocks": 7}, **arguments)
    base = settled_nbytes()
    _C.peak_unsharded_nbytes(reset=True)
    with raising_in(trainer.model.module, "register_forward_pre_hook"):
        trainer.forward()
    reserved = _C.peak_unsharded_nbytes(reset=True) - base
    body(trainer)
    assert 0 < _C.peak_unsharded_nbytes() - base <= reserved


class FullPool:
    """Fails the first growth of a storage, or all of them with ``always``. The second try is outside of the
    pool.
    """

    def __init__(self, always: bool) -> None:
        self.resize, self.always, self.refused = torch.UntypedStorage.resize_, always, 0
        self.last: Any = None

    def __call__(self, storage: Any, nbytes: int) -> Any:
        if nbytes and (self.always or storage._cdata != self.last):
            self.last = storage._cdata
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.last = None
        return self.resize(storage, nbytes)


@pytest.mark.parametrize("always", [False, True])
def test_storage_that_a_full_pool_refuses_is_allocated_outside_of_it(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of the pool torch's allocator can free cached memory. If the device is still full, the error is
    raised.
    """
    pool = FullPool(always)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, nbytes: pool(storage, nbytes))
    with pytest.raises(torch.OutOfMemoryError) if always else contextlib.nullcontext():
        plain(Trainer(0))
    has_piece = WIDTH > 5  # the arena block is requested twice before
    assert pool.refused == (4 if has_piece else 2) if always else pool.refused > 7 * STEPS
