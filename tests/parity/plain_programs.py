"""Random training loops compared with the plain, unsharded module, independently of torch's FSDP1.

``python -m tests.parity.plain_programs --seconds 60`` runs programs with fresh seeds on 2 ranks and prints
each failing one. ``--seed`` sets the first seed.

All ranks have the same data, in float64, so that averaged gradients equal the plain module's. Each action
runs on the sharded and on the plain model. Then its results, parameters, gradients and optimizer states are
compared. The values are read from this rank's shards, without any call that a step makes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils.checkpoint import CheckpointError

from tests import ranks, settings
from tests.parity.engine import implementation
from tests.parity.programs import (
    STATES,
    Illegal,
    Operation,
    Program,
    Side,
    build,
    generate,
    groups,
    has_float32,
    operation,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
CLOSE_IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-6}  # sums of parts in float32 are in a different order
tolerance = dict(CLOSE)
RUN_TIMEOUT_S = 180.0

# ------------------------------------------------------------------ comparing


class Ended(Exception):
    """The plain module's backward has raised, so there is nothing to compare."""


class Different(Exception):
    """A result differs from the plain module's."""


@dataclass
class Part:
    """The part of one parameter in this rank's shard of the flat parameter."""

    name: str
    flat: Any
    begin: int  # offset of the part in the shard
    first: int  # offset of the part in the parameter
    numel: int
    whole_begin: int  # offset of the parameter in the flat parameter
    held: Any  # the parameter visible to users, with use_orig_params
    view: Any  # writable view exposed between a forward and its backward; or None


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").lstrip(".")


def parts(model: nn.Module) -> Iterator[Part]:
    for prefix, unit in model.named_modules():
        if not hasattr(unit, "_handle") or unit._handle is None:
            continue
        for flat in unit.params:
            begin = 0
            for index, (name, info, numel) in enumerate(
                zip(flat._fqns, flat._shard_param_infos, flat._numels, strict=True)
            ):
                held = None if flat._params is None else flat._params[index]
                slot = flat._param_infos[index]
                shown = slot.module._parameters.get(slot.param_name)
                view = None if held is None or isinstance(shown, nn.Parameter) else shown
                if info.in_shard:
                    yield Part(
                        clean(f"{prefix}.{name}"), flat, info.offset_in_shard, info.intra_param_start_idx,
                        info.numel_in_shard, begin, held, view,
                    )  # fmt: skip
                begin += numel


def mine(part: Part, value: Tensor) -> Tensor:
    """Return this rank's part of an unsharded parameter or gradient."""
    return value.detach().flatten()[part.first : part.first + part.numel]


def in_shard(part: Part, value: Tensor | None) -> Tensor | None:
    """Return this rank's part of a gradient or state that is either sharded or unsharded."""
    if value is None:
        return None
    value = value.detach()
    if part.held is not None:
        return value.flatten() if value.numel() == part.numel else mine(part, value)
    shard_numel = part.flat._local_shard.numel() if hasattr(part.flat, "_local_shard") else part.flat.numel()
    if value.numel() == shard_numel:
        return value.flatten()[part.begin : part.begin + part.numel]
    return value.flatten()[part.whole_begin + part.first :][: part.numel]


def same(label: str, expected: Any, actual: Any) -> None:
    if isinstance(actual, ShardedTensor):
        for shard in actual.local_shards():
            rows = expected.detach()
            for dim, (offset, size) in enumerate(
                zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            ):
                rows = rows.narrow(dim, offset, size)
            same(label, rows, shard.tensor)
        return
    if not (isinstance(expected, Tensor) and isinstance(actual, Tensor)):
        if expected is not actual and expected != actual:
            raise Different(f"{label}: plain {_shown(expected)}, sharded {_shown(actual)}")
        return
    expected, actual = expected.detach().cpu(), actual.detach().cpu()
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        raise Different(f"{label}: plain {expected.dtype}{list(expected.shape)}, sharded {actual.dtype}"
                        f"{list(actual.shape)}")  # fmt: skip
    if not expected.is_floating_point():
        if not torch.equal(expected, actual):
            raise Different(f"{label}: plain {_shown(expected)}, sharded {_shown(actual)}")
    elif not torch.allclose(expected, actual, equal_nan=True, **tolerance):
        worst = int((expected - actual).abs().nan_to_num(nan=float("inf")).argmax())
        values = expected.flatten()[worst].item(), actual.flatten()[worst].item()
        raise Different(
            f"{label}: plain {values[0]!r}, sharded {values[1]!r} at {worst} of {expected.numel()}"
        )


def _shown(value: Any) -> str:
    return f"{list(value.shape)} {value.flatten()[:4].tolist()}" if isinstance(value, Tensor) else repr(value)


def compare_states(sharded: Side, plain: Side) -> None:
    """Compare parameters, gradients and optimizer states, read from this rank's shards."""
    expected = dict(plain.model.named_parameters())
    found = list(parts(sharded.model))
    with_gradients = {id(part.flat) for part in found if expected[part.name].grad is not None}
    for part in found:
        parameter = expected[part.name]
        holder = part.flat if part.held is None else part.held
        shard = getattr(part.flat, "_local_shard", part.flat)
        shard = part.flat if part.flat.numel() == shard.numel() else shard
        value = in_shard(replace(part, held=None), shard)
        if part.held is not None and part.view is None:
            value = in_shard(part, part.held)  # new data is written back later
        if (
            part.view is not None
            and value is not None
            and not value.cpu().allclose(mine(part, parameter).cpu())
        ):
            value = mine(part, part.view)  # a write to the view is written back later
        same(f"parameter {part.name}", mine(part, parameter), value)
        if not plain.local:
            gradient, grad = in_shard(part, holder.grad), parameter.grad
            if grad is None and gradient is not None and id(part.flat) in with_gradients:
                grad = torch.zeros_like(parameter)  # [Note: Restrictions beside the plain module]
            same(f"gradient {part.name}", None if grad is None else mine(part, grad), gradient)
        of_plain, of_sharded = (
            plain.optimizer.state.get(parameter, {}),
            sharded.optimizer.state.get(holder, {}),
        )
        for state in STATES:
            if of_plain.get(state) is not None:
                same(
                    f"state {state} {part.name}",
                    mine(part, of_plain[state]),
                    in_shard(part, of_sharded.get(state)),
                )


def compare_returned(
    sharded: dict[str, Any], plain: dict[str, Any], model: nn.Module, optimizer: Any
) -> None:
    names = {name: value for name, value in model.state_dict().items()}
    states = {name: optimizer.state.get(value, {}) for name, value in model.named_parameters()}
    for label, value in sharded.items():
        if label.startswith("saved state "):
            _, _, state, name = label.split()
            if states[name]:  # [Note: Restrictions beside the plain module]: zeros
                same(label, states[name][state], value)
        elif label.startswith("saved "):
            same(label, names[label.split()[1]], value)
        else:
            same(label, plain.get(clean(label)), value)
    assert plain.keys() <= set(map(clean, sharded))


def _agreed(failure: str | None) -> str | None:
    """Return the first failure of any rank, on all ranks."""
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, failure, group=groups()["agree"])
    return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None), None)


def run_program(rank: int, world_size: int, program: Program, is_legal: bool = False) -> str | None:
    """Run a program on both sides and return the first difference, equal on all ranks, or None. With
    ``is_legal`` no action may be illegal.
    """
    groups()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    tolerance.update(CLOSE_IN_FLOAT32 if has_float32(program.blocks) else CLOSE)
    try:
        sides = []
        for fsdp in (implementation("fsdp_c"), None):
            side = Side(program.point, fsdp, rank, world_size, program=program)  # type: ignore[arg-type]
            side.start(lambda run: build(program, run))
            sides.append(side)
        ending = operation("train"), operation("step"), operation("save", kind="FULL"), operation("train")
        for number, action in enumerate(program.operations + ending, start=1):
            failure = _agreed(_run_action(sides[0], sides[1], action, is_legal))
            if failure is not None:
                return f"action {number}, {action}: {failure}"
        held = sum(handle.unsharded_nbytes for handle in sides[0].model._all_handles)
        return _agreed(f"{held} bytes stay unsharded after the last backward" if held else None)
    except Ended:
        return None
    finally:
        torch.set_default_dtype(before)


def _run_action(sharded: Side, plain: Side, action: Operation, is_legal: bool) -> str | None:
    found = []
    try:
        for side in (plain, sharded):
            found.append(getattr(side, "do_" + action.name)(**dict(action.arguments)) or {})
        compare_returned(found[1], found[0], plain.model, plain.optimizer)
        compare_states(sharded, plain)
    except Illegal:
        return "it is illegal" if is_legal else None
    except Different as different:
        return str(different)
    except CheckpointError as error:
        if not found:
            raise Ended from error
        return f"sharded raised CheckpointError: {error}"
    except Exception as error:
        return f"{'sharded' if found else 'plain'} raised {type(error).__name__}: {error}"
    return None


# ------------------------------------------------------------------ the command


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long new programs are begun")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; a fresh one by default")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(arguments)
    ranks.os.environ[settings.DEVICE] = given.device
    pool = ranks.pool(given.ranks)
    first = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    print(f"programs from seed {first}", flush=True)
    failures, deadline = 0, time.monotonic() + given.seconds
    for seed in itertools.count(first):
        if time.monotonic() > deadline:
            break
        program = generate(seed, "plain", given.ranks)
        try:
            why = pool.run(__spec__.name, "run_program", {"program": program}, RUN_TIMEOUT_S)[0]
        except ranks.RankFailure as failure:  # a rank died or hangs
            why = f"{type(failure).__name__}: {failure}"
        if why is not None:
            failures += 1
            print(f"\nseed {seed}:\n{program}\n{why}", flush=True)
    print(f"\n{seed - first} programs, {failures} of them not as the plain module", flush=True)
    ranks.close_pools()
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
