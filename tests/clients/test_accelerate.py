"""Hugging Face accelerate: Accelerator with FullyShardedDataParallelPlugin, fsdp_version 1."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.support import (
    ON_CPU,
    ROOT,
    TIMEOUT_S,
    assert_ours,
    assert_same_parameters,
    environment,
    full_parameters,
    gpus_that_are_cpus,
    launched,
    require,
    train_reference,
)
from tests.models import WIDTH, Net
from tests.processes import run_python
from tests.ranks import both_views, on_ranks

require("accelerate")

LIBRARY = "accelerate"
BATCH = 3  # per rank
SAMPLES = 48


def accelerator(rank, world_size, *, mixed_precision="no", micro_batches=1, **plugin_options):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    launched(rank, world_size)
    AcceleratorState._reset_state(reset_partial_state=True)
    gpus_that_are_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **plugin_options,
    )
    return Accelerator(
        cpu=ON_CPU,
        fsdp_plugin=plugin,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=micro_batches,
    )


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator)
    )


def whole_loss(model: nn.Module, micro: int) -> torch.Tensor:
    """Return the loss of a micro batch of two ranks."""
    inputs, targets = (whole.split(2 * BATCH)[micro] for whole in data().tensors)
    return F.mse_loss(model(inputs).float(), targets)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net(2)


def prepared(acc, seed: int = 0, **adam):
    """Prepare model, optimizer and data as a script does."""
    model = acc.prepare(net(seed))
    assert_ours(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adam)
    return (model, *acc.prepare(optimizer, DataLoader(data(), batch_size=BATCH)))


@contextlib.contextmanager
def trusting_torch_load():
    """Let torch.load unpickle ShardedTensors, which local state dicts contain: accelerate loads weights only."""
    load = torch.load
    with mock.patch.object(
        torch, "load", lambda *args, **kwargs: load(*args, **kwargs | {"weights_only": False})
    ):
        yield


def train(acc, model, optimizer, batches, max_norm=None):
    """Train as in accelerate's documentation and return the mean loss over ranks of each optimizer step."""
    losses, total = [], 0.0
    for inputs, targets in batches:
        with acc.accumulate(model):
            loss = F.mse_loss(model(inputs), targets)
            acc.backward(loss)
            if acc.sync_gradients and max_norm is not None:
                acc.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        total += acc.reduce(loss.detach(), "mean").item() / acc.gradient_accumulation_steps
        if acc.sync_gradients:
            losses.append(total)
            total = 0.0
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_orig_params": True},
        {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True, "forward_prefetch": True},
        {"cpu_offload": True, "use_orig_params": True, "backward_prefetch": "BACKWARD_PRE"},
        {"sharding_strategy": "NO_SHARD"},
    ],
    ids=["flat", "orig", "recomputed", "offloaded", "replicated"],
)
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_accumulated_clipped_steps_are_those_of_the_unsharded_model(rank, world_size, options):
    acc = accelerator(rank, world_size, micro_batches=2, **options)
    model, optimizer, loader = prepared(acc)
    losses = train(acc, model, optimizer, loader, max_norm=0.5)

    plain = net()
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = train_reference(plain, whole_loss, range(4), optimizer=adam, max_norm=0.5, micro_batches=2)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same_parameters(full_parameters(model), plain.state_dict())
    assert_same_parameters(acc.get_state_dict(model), plain.state_dict() if rank == 0 else {})


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@both_views
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_load_state_resumes_bitwise_from_save_state(rank, world_size, use_orig_params, kind, tmp_path):
    acc = accelerator(rank, world_size, use_orig_params=use_orig_params, state_dict_type=kind)
    model, optimizer, loader = prepared(acc)
    batches = list(loader)
    train(acc, model, optimizer, batches[:2])
    acc.save_state(tmp_path)
    expected = train(acc, model, optimizer, batches[2:5])
    end = full_parameters(model)

    fresh = accelerator(rank, world_size, use_orig_params=use_orig_params, state_dict_type=kind)
    model, optimizer, _ = prepared(fresh, seed=1)
    # accelerate loads sharded optimizer state into existing state
    train(fresh, model, optimizer, batches[7:])
    with trusting_torch_load() if kind == "LOCAL_STATE_DICT" else contextlib.nullcontext():
        fresh.load_state(tmp_path)
    assert train(fresh, model, optimizer, batches[2:5]) == expected
    for name, value in full_parameters(model).items():
        assert torch.equal(value, end[name]), name


@both_views
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_low_precision_model_is_trained_in_fp32_under_bf16(rank, world_size, use_orig_params):
    """accelerate upcasts flat parameters between construction and the first forward."""
    acc = accelerator(rank, world_size, use_orig_params=use_orig_params, mixed_precision="bf16")
    model = acc.prepare(net().bfloat16())
    optimizer = acc.prepare(torch.optim.SGD(model.parameters(), lr=1e-3))
    loader = acc.prepare(DataLoader(data(), batch_size=BATCH))
    losses = train(acc, model, optimizer, loader)
    assert {param.dtype for param in model.parameters()} == {torch.float32}

    plain = net().bfloat16().float()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-3)
    # a cache that outlives a step would keep its weights
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = train_reference(plain, whole_loss, range(8), optimizer=sgd)
    assert losses == pytest.approx(expected, rel=2e-2)  # bf16 has 8 significant bits
    found = full_parameters(model)
    for name, param in plain.named_parameters():
        assert found[name].dtype is torch.float32
        moved = (param - start[name]).norm()  # such small steps would round to 0 or to one ulp in bf16
        assert (found[name] - param).norm() <= 0.05 * moved + 1e-7, name


@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_saved_models_are_those_of_the_unsharded_model(rank, world_size, tmp_path):
    """Accelerator.save_model and merge_fsdp_weights write safetensors that a plain model loads."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    acc = accelerator(rank, world_size, state_dict_type="SHARDED_STATE_DICT")
    model, optimizer, loader = prepared(acc)
    train(acc, model, optimizer, list(loader)[:2])
    expected = full_parameters(model)
    acc.save_model(model, tmp_path / "whole")
    acc.save_state(tmp_path / "state")
    merge_fsdp_weights(str(tmp_path / "state" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    acc.wait_for_everyone()
    for name in ("whole", "merged"):
        assert_same_parameters(load_file(tmp_path / name / "model.safetensors"), expected)
    assert isinstance(acc.unwrap_model(model), Net)


def test_launch_runs_an_unchanged_script_under_fsdp_c():
    options = ["--use_fsdp", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--main_process_port", "0"]
    script = ["-m", "fsdp_c", "examples/plain_torchrun.py", "--steps", "2"]
    command = ["-m", "accelerate.commands.launch", *options, *script]
    done = run_python(*command, cwd=ROOT, **environment(TORCH_LOGS="fsdp_c"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": loss ") == 2
    assert done.stderr.count("4 units and segments, ") == 1 and "FULL_SHARD over 2" in done.stderr
