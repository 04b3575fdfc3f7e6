"""Losses with terms of the parameters themselves, as they are between steps: penalties on weights and the
like."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.ranks import device, on_ranks
from tests.training import wrap

OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
}
# excludes offloaded flat parameters: on a GPU autograd's CPU thread may run their term while unsharded
VARIANTS = [(name, orig) for name in OPTIONS for orig in (True, False) if orig or name != "offload"]
# each character is one of four steps: under no_sync() or not; gradients cleared after it or not; the term
# made before or after the forward
PLANS = {
    "each step": ("ssss", "cccc", "bbbb"),
    "accumulated": ("ssss", "----", "bbab"),
    "no_sync": ("nsss", "-c-c", "b-bb"),
}


def wrapped(which: str, use_orig_params: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    policy = ModuleWrapPolicy({nn.Linear})
    return wrap(module, which, auto_wrap_policy=policy, use_orig_params=use_orig_params, **options)


def penalty(model: nn.Module) -> torch.Tensor:
    """Return a penalty on this rank's part of the parameters."""
    terms: torch.Tensor = sum(param.square().sum() for param in model.parameters() if param.numel())  # type: ignore[assignment]
    return terms


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None or not p.numel() else p.grad.clone() for p in model.parameters()]


def train(model: Any, rank: int, plan: str, with_penalty: bool = True) -> list[list[torch.Tensor | None]]:
    """The gradients after each step: of the mean square of outputs, and of the parameters' own term."""
    seen = []
    for step, (sync, clear, term) in enumerate(zip(*PLANS[plan], strict=True)):
        inputs = torch.arange(24.0, device=device()).view(4, 6).sin() + rank + step
        with model.no_sync() if sync == "n" else nullcontext():
            before = penalty(model) if with_penalty and term == "b" else None
            loss = model(inputs).square().mean()
            if with_penalty and before is None and term == "a":
                before = penalty(model)
            (loss if before is None else loss + before).backward()
        seen.append(gradients(model))
        if clear == "c":
            model.zero_grad()
    return seen


@pytest.mark.parametrize("plan", ["each step", "accumulated"])
@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "bf16"])
@on_ranks(2)
def test_terms_made_before_the_forward_give_torchs_gradients(rank: int, name: str, plan: str) -> None:
    """torch raises where a term is of a flat parameter's shard."""
    ours, theirs = (train(wrapped(which, True, **OPTIONS[name]), rank, plan) for which in ("fsdp_c", "torch"))
    # bitwise, or close if gradients accumulate: the additions are in another order
    tolerance = {"rtol": 0.0, "atol": 0.0} if plan == "each step" else {"rtol": 1e-5, "atol": 1e-6}
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for index, (one, two) in enumerate(zip(mine, other, strict=True)):
            assert (one is None) == (two is None), (step, index)
            if one is not None:
                torch.testing.assert_close(one, two, **tolerance)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("name", "use_orig_params"), VARIANTS)
@on_ranks(2)
def test_gradients_of_terms_are_added_to_those_of_the_outputs(
    rank: int, name: str, use_orig_params: bool, plan: str
) -> None:
    """Gradients of the terms are not reduced, and are present however the step obtained its gradients."""
    with_terms, without = (wrapped("fsdp_c", use_orig_params, **OPTIONS[name]) for _ in range(2))
    found, plain = train(with_terms, rank, plan), train(without, rank, plan, with_penalty=False)
    own = [2 * param.detach() for param in with_terms.parameters()]
    count = 0
    for step, (sync, clear, term) in enumerate(zip(*PLANS[plan], strict=True)):
        count += term != "-"
        for index, (one, two) in enumerate(zip(found[step], plain[step], strict=True)):
            assert (one is None) == (two is None), (step, index)
            if one is not None and two is not None and sync == "s":
                place = f"{step, index}: "
                torch.testing.assert_close(one, two + count * own[index], msg=place.__add__)
        count = 0 if clear == "c" else count
