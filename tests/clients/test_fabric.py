"""Lightning Fabric with FSDPStrategy: automatic and manual wrapping, checkpoints, resuming on a different
number of ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.clients.lightning_models import (
    STEPS,
    Layer,
    adam,
    assert_trained_as_unsharded,
    manually_wrapped,
    mlp,
    on_cpu,
    rank_batch,
    whole_loss,
)
from tests.clients.support import TIMEOUT_S, assert_ours, full_parameters, launched, require, train_reference
from tests.ranks import both_views, device_type, on_ranks, pool

require("lightning")

LIBRARY = "fabric"
HERE = "tests.clients.test_fabric"


def fabric(rank: int, world_size: int, precision: str = "32-true", **options):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy

    launched(rank, world_size)
    found = Fabric(
        accelerator=device_type(),
        devices=world_size,
        strategy=on_cpu(FSDPStrategy)(**options),
        precision=precision,
    )
    found.launch()
    return found


def train(fabric, model, optimizer, steps, micro_batches=1, max_norm=None) -> list[float]:
    losses = []
    for step in steps:
        total = 0.0
        for micro in range(micro_batches):
            own = rank_batch(step * micro_batches + micro, fabric.global_rank, fabric.world_size)
            inputs, targets = fabric.to_device(own)
            with fabric.no_backward_sync(model, enabled=micro < micro_batches - 1):
                loss = F.mse_loss(model(inputs), targets) / micro_batches
                fabric.backward(loss)
            total += fabric.all_reduce(loss.detach(), reduce_op="mean").item()
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {"auto_wrap_policy": {Layer}},
        {
            "auto_wrap_policy": {Layer},
            "activation_checkpointing_policy": {Layer},
            "sharding_strategy": "SHARD_GRAD_OP",
        },
        {"auto_wrap_policy": {Layer}, "cpu_offload": True},
    ],
    ids=["wrapped", "recomputed", "offloaded"],
)
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_model_and_optimizer_set_up_together_train_as_unsharded(rank, world_size, options):
    run = fabric(rank, world_size, **options)
    plain = mlp()
    model, optimizer = run.setup(plain, adam(plain))
    assert_ours(model)
    accumulated = {"micro_batches": 2, "max_norm": 0.5}
    losses = train(run, model, optimizer, range(3), **accumulated)
    assert_trained_as_unsharded(losses, full_parameters(model._forward_module), range(3), **accumulated)


@both_views
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_layers_wrapped_by_hand_train_as_unsharded(rank, world_size, use_orig_params):
    run = fabric(rank, world_size, use_orig_params=use_orig_params)
    with run.init_module():
        model = manually_wrapped(mlp())
    model = run.setup_module(model)
    assert_ours(model)
    optimizer = run.setup_optimizers(adam(model))
    losses = train(run, model, optimizer, range(STEPS))
    assert_trained_as_unsharded(losses, full_parameters(model._forward_module), range(STEPS))


@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_marked_methods_compute_with_gathered_parameters(rank, world_size):
    run = fabric(rank, world_size, auto_wrap_policy={Layer})
    model = run.setup_module(mlp())
    model.mark_forward_method("loss")
    inputs = rank_batch(0, rank, world_size)
    loss, expected = model.loss(*run.to_device(inputs)), mlp().loss(*inputs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    run.backward(loss)


@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_bf16_mixed_precision_keeps_fp32_parameters(rank, world_size):
    run = fabric(rank, world_size, precision="bf16-mixed", auto_wrap_policy={Layer})
    model = run.setup_module(mlp())
    losses = train(run, model, run.setup_optimizers(adam(model)), range(STEPS))
    plain = mlp()
    expected = train_reference(plain, whole_loss, range(STEPS), optimizer=adam(plain))
    assert losses == pytest.approx(expected, rel=3e-2)  # bf16 has 8 significant bits
    assert {value.dtype for value in full_parameters(model._forward_module).values()} == {torch.float32}


def wrapped_run(rank: int, world_size: int, seed: int, empty: bool, **options):
    run = fabric(rank, world_size, auto_wrap_policy={Layer}, **options)
    with run.init_module(empty_init=empty):
        plain = mlp(seed)
    model = run.setup_module(plain)
    return run, model, run.setup_optimizers(adam(model))


def trained_and_saved(rank: int, world_size: int, path: Path, options: dict) -> list[float]:
    run, model, optimizer = wrapped_run(rank, world_size, 0, False, **options)
    losses = train(run, model, optimizer, range(STEPS // 2))
    run.save(path, {"model": model, "optimizer": optimizer, "step": STEPS // 2})
    return losses


def resumed(rank: int, world_size: int, path: Path, options: dict) -> tuple[list[float], dict[str, Tensor]]:
    run, model, optimizer = wrapped_run(rank, world_size, 1, True, **options)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert run.load(path, state) == {}
    losses = train(run, model, optimizer, range(state["step"], STEPS))
    return losses, full_parameters(model._forward_module)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@both_views
def test_run_resumed_on_another_number_of_ranks_ends_as_the_unsharded_one(tmp_path, use_orig_params, kind):
    """2 ranks save, and 3 ranks load into a model built on the meta device."""
    arguments = {
        "path": tmp_path / "checkpoint",
        "options": {"use_orig_params": use_orig_params, "state_dict_type": kind},
    }
    before = pool(2, LIBRARY).run(HERE, "trained_and_saved", arguments, TIMEOUT_S)[0]
    after, parameters = pool(3, LIBRARY).run(HERE, "resumed", arguments, TIMEOUT_S)[0]
    assert_trained_as_unsharded(before + after, parameters, range(STEPS))


@on_ranks(4, TIMEOUT_S, LIBRARY)
def test_hybrid_run_resumed_from_shards_ends_as_the_unsharded_one(rank, world_size, tmp_path):
    """Fabric lets torch shard the optimizer's state over all ranks, while units are sharded over two."""
    mesh = init_device_mesh(device_type(), (2, 2))
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh, "state_dict_type": "sharded"}
    before = trained_and_saved(rank, world_size, tmp_path, options)
    after, parameters = resumed(rank, world_size, tmp_path, options)
    assert_trained_as_unsharded(before + after, parameters, range(STEPS))
