"""Optional units: a rank that does not run one takes part in its collectives, and gives zeros for its
gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

import fsdp_c
import fsdp_c.checkpoint
from fsdp_c import BackwardPrefetch, CPUOffload, MixedPrecision
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.sharding.optional import is_marked
from fsdp_c.wrap import ModuleWrapPolicy
from tests.distributed.test_collectives import calls, counted
from tests.models import WIDTH
from tests.ranks import all_strategies, device, on_ranks
from tests.storage import HELD_BACK, live_nbytes, live_nbytes_after_a_failure, settled_nbytes
from tests.training import batch, debug_level, wrap

HIDDEN, EXPERTS, LAYERS = 7, 3, 2
TIMEOUT_S = 150


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """The caller chooses experts and their order. ``recompute``: "expert" or "experts"."""

    def __init__(self, recompute: str | None, reentrant: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.recompute, self.reentrant = recompute, reentrant

    def run_expert(self, index: int, x: Tensor) -> Tensor:
        if self.recompute == "expert":
            return checkpoint(self.experts[index], x, use_reentrant=self.reentrant)
        return self.experts[index](x)

    def run_experts(self, x: Tensor, chosen: list[int]) -> Tensor:
        for index in chosen:
            x = x + self.run_expert(index, x)
        return x

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = torch.tanh(self.mix(x))
        if self.recompute == "experts":
            return checkpoint(self.run_experts, x, chosen, use_reentrant=self.reentrant)
        return self.run_experts(x, chosen)


class Encoder(nn.Module):
    """The encoder of a modality, with units inside and its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Expert(), Expert())
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x) * self.scale


class Program(NamedTuple):
    """The modules that one forward runs."""

    encoder: int  # number of calls
    layers: list[list[int]]  # experts of each layer


class Model(nn.Module):
    """``recompute``: "layer" checkpoints whole layers; see Layer."""

    def __init__(self, recompute: str | None = None, reentrant: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.encoder = Encoder()
        self.layers = nn.ModuleList(Layer(recompute, reentrant) for _ in range(LAYERS))
        self.recompute, self.reentrant = recompute, reentrant
        if tied:
            for layer in self.layers:
                layer.experts[1].down.weight = layer.experts[0].down.weight

    def forward(self, x: Tensor, program: Program) -> Tensor:
        x = self.first(x)
        for _ in range(program.encoder):
            x = x + self.encoder(x)
        for layer, chosen in zip(self.layers, program.layers, strict=True):
            if self.recompute == "layer":
                x = checkpoint(layer, x, chosen, use_reentrant=self.reentrant)
            else:
                x = layer(x, chosen)
        return x


def some_program(choose: random.Random, repeats: bool) -> Program:
    """Some experts in any order, and perhaps none; with ``repeats`` some several times."""
    layers = []
    for _ in range(LAYERS):
        count = choose.randrange(4)
        layers.append(
            choose.choices(range(EXPERTS), k=count) if repeats else choose.sample(range(EXPERTS), count)
        )
    return Program(choose.randrange(3 if repeats else 2), layers)


def mark(model: Model) -> Model:
    fsdp_c.optional(model.encoder)
    for layer in model.layers:
        fsdp_c.optional(layer.experts)  # a container: its modules are optional
    return model


PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "reduce fp32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
STEPS = ("train", "accumulate", "two_forwards", "two_graphs", "evaluate", "nobody")


class Run:
    """Some random steps. Experts and the encoder are optional units, or parts of the units around them."""

    def __init__(
        self, seed: int, rank: int, optional: bool, strategy: str, in_double: bool, mesh: Any
    ) -> None:
        choose = random.Random(seed)
        use_orig_params = choose.random() < 0.6
        # in float64 sums may be in another order: a unit runs several times in a forward, or four ranks add up
        self.in_double = in_double or choose.random() < 0.25
        self.dtype = torch.float64 if self.in_double else torch.float32
        offloads = strategy != "NO_SHARD" and choose.random() < 0.25
        wrapping: dict[str, Any] = {
            "strategy": strategy,
            "device_mesh": mesh,
            "mixed_precision": None if self.in_double else choose.choice(list(PRECISIONS.values())),
            "backward_prefetch": choose.choice([*BackwardPrefetch, None]),
            "forward_prefetch": choose.random() < 0.5,
            "limit_all_gathers": choose.random() < 0.5,
            "cpu_offload": CPUOffload(offloads),
        }
        recompute = choose.choice([None, None, "expert", "experts", "layer"])
        reentrant = choose.random() < 0.5
        # a tied weight of two experts belongs to the layer, which every rank reduces once; a reentrant checkpoint
        # around an expert is reduced in a backward of its own
        tied = choose.random() < 0.3 and not (reentrant and recompute in ("expert", "experts"))
        # "up.bias" is a part of a unit, which has segments then
        frozen = choose.choice([None, None, "encoder", "experts.1", "up.bias"])
        full_precision_in_eval = choose.random() < 0.3
        self.steps = choose.choices(STEPS, k=3)
        torch.manual_seed(seed)
        # without optional units such a checkpoint would be inside of a unit
        net = Model(recompute if optional or recompute == "layer" else None, reentrant, tied).to(self.dtype)
        for name, param in net.named_parameters():
            param.requires_grad_(frozen is None or frozen not in name)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("FSDP_USE_FULL_PREC_IN_EVAL", str(int(full_precision_in_eval)))
            self.model = wrap(
                mark(net) if optional else net,
                auto_wrap_policy=ModuleWrapPolicy({Layer, Expert, Encoder} if optional else {Layer}),
                use_orig_params=use_orig_params or not optional,
                **wrapping,
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.programs = random.Random(f"{seed} {rank}")
        self.data = torch.Generator(device=device()).manual_seed(100 * seed + rank)
        self.trace: dict[str, Tensor] = {}

    def record(self, label: str, value: Tensor) -> None:
        self.trace[f"{len(self.trace)}: {label}"] = value.detach().clone()

    def loss(self, program: Program | None = None) -> Tensor:
        program = program or some_program(self.programs, self.in_double)
        x = torch.randn(3, WIDTH, generator=self.data, device=device(), dtype=self.dtype)
        loss = self.model(x, program).to(self.dtype).square().mean()
        self.record(f"loss of {program}", loss)
        return loss

    def train(self) -> None:
        self.loss().backward()

    def accumulate(self) -> None:
        with self.model.no_sync():
            self.train()
            self.train()
        self.train()
        self.train()

    def two_forwards(self) -> None:
        (self.loss() + self.loss()).backward()

    def two_graphs(self) -> None:
        first, second = self.loss(), self.loss()
        second.backward()
        first.backward()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss()
        self.model.train()
        self.train()

    def nobody(self) -> None:
        """No rank runs any optional unit."""
        self.loss(Program(0, [[]] * LAYERS)).backward()

    def step(self, kind: str) -> None:
        getattr(self, kind)()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with FSDP.summon_full_params(self.model, writeback=False):
            for name, param in self.model.named_parameters():
                self.record(f"{name} after {kind}", param)


def check(seed: int, rank: int, strategy: str, in_double: bool = False, mesh: Any = None) -> None:
    """Assert the bits of a model without optional units, where unused parameters of a unit get zeros."""
    runs = [Run(seed, rank, optional, strategy, in_double, mesh) for optional in (True, False)]
    for run in runs:
        for kind in run.steps:
            run.step(kind)
    found, expected = (run.trace for run in runs)
    assert found.keys() == expected.keys()
    for label, value in found.items():
        rtol = 1e-6 if runs[0].in_double else 0.0
        assert torch.allclose(value, expected[label], rtol=rtol, atol=1e-2 * rtol), f"seed {seed}: {label}"


@pytest.mark.parametrize("part", range(2))
@all_strategies
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_random_programs_have_the_values_of_zeros_from_ranks_that_skip(
    rank: int, strategy: str, part: int
) -> None:
    for seed in range(12 * part, 12 * part + 12):
        check(seed, rank, strategy)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_random_programs_on_four_ranks(rank: int, strategy: str) -> None:
    is_hybrid = strategy != "FULL_SHARD"
    mesh = init_device_mesh(device().type, (2, 2)) if is_hybrid else None
    for seed in range(6):
        check(seed, rank, strategy, in_double=not is_hybrid, mesh=mesh)


# ----------------------------------------------------------------- beside an unsharded model


def optional_model(**wrapping: Any) -> Any:
    torch.manual_seed(0)
    return wrap(mark(Model()), auto_wrap_policy=ModuleWrapPolicy({Layer, Expert, Encoder}), **wrapping)


NOTHING = Program(0, [[]] * LAYERS)
EVERYTHING = Program(1, [[2, 0, 1]] * LAYERS)
SOME = Program(0, [[1], [0, 2, 0]])


@on_ranks(2)
def test_optional_units_that_the_synchronised_backward_skips_are_reduced(rank: int) -> None:
    """They have gradients of no_sync. The backward begins before the unit around them."""
    model, inputs = optional_model(), []
    layer = model.module.layers[1]
    layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with model.no_sync():
        model(batch(rank), [SOME, NOTHING][rank]).square().mean().backward()
    model(batch(rank), NOTHING)
    inputs[-1].square().mean().backward()
    torch.manual_seed(0)
    plain = Model().to(device())
    plain(batch(0), SOME).square().mean().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for expert, expected in zip(layer.module.experts, plain.layers[1].experts, strict=True):
            for param, reference in zip(expert.parameters(), expected.parameters(), strict=True):
                whole = torch.zeros_like(reference) if reference.grad is None else reference.grad / 2
                torch.testing.assert_close(param.grad, whole)


# ----------------------------------------------------------------- the same collectives on all ranks


@on_ranks(2)
def test_optional_units_are_all_gathered_and_reduced_with_their_parent(rank: int) -> None:
    """Sizes tell units apart: a layer has 30 elements, an expert 77, the root 30."""
    torch.manual_seed(0)
    layer = Layer(None, False)
    fsdp_c.optional(layer.experts)
    model = wrap(layer, auto_wrap_policy=ModuleWrapPolicy({Expert}))
    sizes = {unit._handle.layout.padded_numel for unit in FSDP.fsdp_modules(model)[1:]}
    (expert,), around = sizes, model._handle.layout.padded_numel
    with calls() as seen:
        model(batch(rank), [[2], []][rank]).sum().backward()
    gathers, reductions = [("AG", expert)] * EXPERTS, [("RS", expert)] * EXPERTS
    assert seen == [("AG", around), *gathers, *gathers, *reductions, ("RS", around)]


@on_ranks(2)
def test_optional_units_stay_unsharded_under_shard_grad_op(rank: int) -> None:
    model = optional_model(strategy="SHARD_GRAD_OP")
    units = len(FSDP.fsdp_modules(model))
    for program in (SOME, NOTHING):
        with calls() as seen:
            model(batch(rank), program).sum().backward()
        assert counted(seen) == {"AG": units, "RS": units}


@on_ranks(2)
def test_optional_units_of_one_parent_are_unsharded_at_a_time(rank: int) -> None:
    model = optional_model(forward_prefetch=False)
    before, most = settled_nbytes(), []
    layers = model.module.layers
    for layer in layers:
        layer.module.mix.register_forward_hook(lambda *_: most.append(live_nbytes() - before))
    model(batch(rank), NOTHING).sum().backward()

    def nbytes(*units: Any) -> int:
        return sum(unit._handle.layout.padded_numel * 4 for unit in units)

    of_root = [model, model.module.encoder, *model.module.encoder.module.stages]
    held = [nbytes(*of_root, layer, *layer.module.experts) for layer in layers]
    held_back = [0, HELD_BACK * nbytes(layers[0].module.experts[2])]
    assert most == [one + more for one, more in zip(held, held_back, strict=True)]
    assert live_nbytes() == before


# ----------------------------------------------------------------- other parts of a step


class Switch(nn.Module):
    """Returns the output of the chosen expert unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(fsdp_c.optional(nn.Sequential(Expert(), Expert())) for _ in range(2))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.experts[chosen](self.first(x))


@on_ranks(2)
def test_a_unit_may_return_the_output_of_an_optional_unit_unchanged(rank: int) -> None:
    grads = []
    for kinds in ({Switch, nn.Sequential, Expert}, {Switch}):
        torch.manual_seed(0)
        model = wrap(Switch(), auto_wrap_policy=ModuleWrapPolicy(kinds))
        for step in range(3):
            model(batch(rank), (rank + step) % 2).square().mean().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            grads.append([param.grad.clone() for param in model.parameters()])
    assert all(torch.equal(*each) for each in zip(*grads, strict=True))


@on_ranks(2)
def test_a_backward_inside_a_forward_reduces_optional_units_it_reached(rank: int) -> None:
    grads = []
    for program in (SOME, NOTHING):
        model = optional_model()
        layer = model.module.layers[0]

        def train_layer(
            module: nn.Module, args: tuple[Any, ...], layer: Any = layer, runs: Any = program
        ) -> None:
            layer(batch(rank), [runs, NOTHING][rank].layers[1]).square().mean().backward()

        handle = model.module.layers[1].register_forward_pre_hook(train_layer)
        model(batch(rank), NOTHING)
        handle.remove()
        grads.append([unit._flat_param.grad for unit in FSDP.fsdp_modules(layer)])
        assert all(grad is not None for grad in grads[-1])
    assert any(grad.any() for grad in grads[0][1:]) and not any(grad.any() for grad in grads[1][1:])


@on_ranks(2)
def test_skipped_optional_units_cause_no_warning(rank: int) -> None:
    with debug_level(dist.DebugLevel.DETAIL):  # validates the order of units
        model = optional_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for program in (EVERYTHING, NOTHING, SOME, EVERYTHING):
            for _ in range(2):
                model(batch(rank), [NOTHING, program][rank]).sum().backward()


@on_ranks(2)
def test_optimizers_in_backward_step_on_all_ranks(rank: int) -> None:
    models = [optional_model(), optional_model()]
    _apply_optimizer_in_backward(torch.optim.SGD, models[0].parameters(), {"lr": 0.1, "weight_decay": 0.1})
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1, weight_decay=0.1)
    for program in (SOME, NOTHING, EVERYTHING):
        for model in models:
            model(batch(rank), [program, NOTHING][rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


@on_ranks(2)
def test_communication_hooks_are_called_for_skipped_optional_units(rank: int) -> None:
    model = optional_model()
    called = []

    def reduce(state: None, full: Tensor, shard: Tensor) -> None:
        called.append(bool(full.any()))
        dist.reduce_scatter_tensor(shard, full)

    model.register_comm_hook(None, reduce)
    model(batch(rank), [SOME, NOTHING][rank]).sum().backward()
    units = len(FSDP.fsdp_modules(model))
    skipped = units - 3 - [3, 0][rank]
    assert (len(called), called.count(False)) == (units, skipped)


@on_ranks(2)
def test_an_expert_that_raises_may_be_left_out(rank: int) -> None:
    """The layer catches it: the others run, and the step ends on all ranks."""
    grads = []
    for raises in (True, False):
        model = optional_model()
        expert = model.module.layers[0].module.experts[1]
        if raises:
            expert.module.register_forward_hook(raise_refused)
        layer = model.module.layers[0].module
        layer.run_expert = functools.partial(run_or_zeros, layer.run_expert, raises)
        model(batch(rank), Program(0, [[2, 1, 0], []])).square().mean().backward()
        grads.append([unit._flat_param.grad for unit in FSDP.fsdp_modules(model)])
    assert all(torch.equal(*each) for each in zip(*grads, strict=True))


def run_or_zeros(run: Any, raises: bool, index: int, x: Tensor) -> Tensor:
    with contextlib.suppress(Refused):
        if index != 1 or raises:
            return run(index, x)
    return torch.zeros_like(x)


class Refused(Exception):
    pass


def raise_refused(*_: Any) -> None:
    raise Refused


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
@on_ranks(2)
def test_after_an_exception_nothing_is_gathered_and_steps_go_on(rank: int, register: str) -> None:
    before = settled_nbytes()
    model = optional_model()
    handle = getattr(model.module.layers[0].module.experts[1].module.down, register)(raise_refused)
    with pytest.raises(Refused):
        model(batch(rank), EVERYTHING).sum().backward()
    handle.remove()
    assert live_nbytes_after_a_failure(before) == before
    model(batch(rank), SOME).sum().backward()
    expected = optional_model()
    expected(batch(rank), SOME).sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)


# ----------------------------------------------------------------- errors


@on_ranks(2)
def test_the_outermost_unit_cannot_be_optional(rank: int) -> None:
    model = wrap(fsdp_c.optional(Expert()))
    with pytest.raises(
        ValueError, match=rf"outermost unit, Expert on rank {rank}, is marked by fsdp_c.optional"
    ):
        model(batch(rank))


@on_ranks(2)
def test_only_modules_are_marked_and_before_they_are_wrapped() -> None:
    with pytest.raises(ValueError, match="Expert is wrapped already: mark it"):
        fsdp_c.optional(wrap(Expert()))
    with pytest.raises(TypeError, match=r"expected an nn.Module but got list"):
        fsdp_c.optional([Expert()])  # type: ignore[type-var]


def test_a_mark_is_copied_with_its_module() -> None:
    expert = Expert()
    assert fsdp_c.optional(expert) is expert
    copies = nn.ModuleList(copy.deepcopy(expert) for _ in range(2))
    assert all(is_marked(one) for one in copies) and not is_marked(copies)
    assert "optional" not in str(expert.state_dict().keys())


@on_ranks(2)
def test_ranks_that_mark_different_modules_optional_are_refused(rank: int) -> None:
    net = Model()
    if rank == 0:
        fsdp_c.optional(net.layers[1].experts[0])
    model = wrap(net, auto_wrap_policy=ModuleWrapPolicy({Expert}))
    with pytest.raises(RuntimeError, match=r"(?s)layers.1.experts.0.*optional.*True.*False"):
        model(batch(rank), EVERYTHING)


@on_ranks(2)
def test_an_optional_unit_called_outside_its_parents_forward_is_refused(rank: int) -> None:
    model = optional_model()
    expert = model.module.layers[0].module.experts[1]
    model(batch(rank), SOME).sum().backward()
    with pytest.raises(
        RuntimeError, match=rf"rank {rank}, unit Expert at 'layers.0.experts.1': its forward is called"
    ):
        expert(batch(rank))
    model(batch(rank), SOME).sum().backward()  # the next step works
    model.module.layers[1].module.mix.register_forward_hook(lambda *_: expert(batch(rank)) and None)
    with pytest.raises(RuntimeError, match=r"with Layer at 'layers.0', the unit around it"):
        model(batch(rank), SOME)


@on_ranks(2)
def test_a_backward_from_a_kept_output_of_an_optional_unit_is_refused(rank: int) -> None:
    model = optional_model()
    kept: list[Tensor] = []
    expert = model.module.layers[0].module.experts[1]
    expert.register_forward_hook(lambda module, args, output: kept.append(output))
    model(batch(rank), SOME)
    with pytest.raises(RuntimeError, match="a gradient reaches it where its parameters are not gathered"):
        kept[0].sum().backward()
    model(batch(rank), SOME).sum().backward()  # the next step works
