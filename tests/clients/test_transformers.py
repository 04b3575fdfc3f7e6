"""The transformers Trainer with FSDP in its arguments. The model's output layer shares the embedding's
weight.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tests.checkpoints import code_of_page
from tests.clients.support import (
    ON_CPU,
    TIMEOUT_S,
    assert_ours,
    assert_same_parameters,
    full_parameters,
    gpus_that_are_cpus,
    launched,
    require,
    train_reference,
)
from tests.ranks import both_views, device, on_ranks

require("transformers", "accelerate")

LIBRARY = "transformers"
BATCH = 2  # per rank
LENGTH = 6
VOCABULARY = 30
STEPS = 6
# the gradient of a key bias is 0 except for rounding, which a smaller epsilon would amplify
ADAM_EPSILON = 1e-4


def language_model(seed: int = 0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=2, n_head=2, eos_token_id=0, **dropouts
        )
    )


def texts(count: int, seed: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    # never predicted; the Trainer divides by the number of other labels
    labels = tokens.index_fill(1, torch.tensor([0]), -100)
    return [{"input_ids": text, "labels": label} for text, label in zip(tokens, labels, strict=True)]


def trainer(
    rank,
    world_size,
    folder,
    *,
    model=language_model,
    use_orig_params=True,
    state_dict_type="FULL_STATE_DICT",
    fsdp_config=None,
    **options,
):
    """Return a Trainer as in a script. Options of FSDP that are not named have the Trainer's defaults."""
    from transformers import Trainer, TrainingArguments

    launched(rank, world_size)
    gpus_that_are_cpus()
    config = {"version": 1, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | (fsdp_config or {})
    config |= {"use_orig_params": use_orig_params, "state_dict_type": state_dict_type}
    defaults = {
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "train_sampling_strategy": "sequential",
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "adam_epsilon": ADAM_EPSILON,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "report_to": [],
        "disable_tqdm": True,
    }
    return Trainer(
        model(),
        TrainingArguments(str(folder), use_cpu=ON_CPU, fsdp=True, fsdp_config=config, **(defaults | options)),
        train_dataset=texts(STEPS * BATCH * world_size, seed=1),
        eval_dataset=texts(3 * BATCH * world_size, seed=2),
    )


def logged_losses(run) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def trained_reference(world_size: int) -> tuple[nn.Module, list[float]]:
    model, batches = language_model(), texts(STEPS * BATCH * world_size, seed=1)

    def loss_of(model, step):
        whole = torch.stack(
            [text["input_ids"] for text in batches[step * BATCH * world_size :][: BATCH * world_size]]
        )
        return model(input_ids=whole, labels=whole).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPSILON, weight_decay=0)
    return model, train_reference(model, loss_of, range(STEPS), optimizer=optimizer, max_norm=0.5)


@both_views
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_trained_evaluated_and_saved_as_the_unsharded_model(rank, world_size, use_orig_params, tmp_path):
    from transformers import GPT2LMHeadModel

    run = trainer(rank, world_size, tmp_path, use_orig_params=use_orig_params)
    run.train()
    assert_ours(run.model)
    plain, losses = trained_reference(world_size)
    assert logged_losses(run) == pytest.approx(losses, abs=2e-4)  # the Trainer rounds logged losses
    assert_same_parameters(full_parameters(run.model), plain.state_dict())

    tokens = torch.stack([text["input_ids"] for text in run.eval_dataset])
    with torch.no_grad():
        expected = plain(input_ids=tokens, labels=tokens).loss.item()
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)

    run.save_model(str(tmp_path / "saved"))
    run.accelerator.wait_for_everyone()
    assert_same_parameters(
        GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict(), plain.state_dict()
    )


@both_views
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_generates_what_the_unsharded_model_generates(rank, world_size, use_orig_params, tmp_path):
    """Generate under summon_full_params, and through the forward method that the Trainer registers."""
    run = trainer(rank, world_size, tmp_path, use_orig_params=use_orig_params, save_strategy="no")
    FSDP = torch.distributed.fsdp.FullyShardedDataParallel
    run.train()
    plain = language_model()
    plain.load_state_dict(full_parameters(run.model))
    prompt = texts(BATCH, seed=3 + rank)[0]["input_ids"][None, :2]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = plain.eval().generate(prompt, **options)
    run.model.eval()
    prompt = prompt.to(device())
    with FSDP.summon_full_params(run.model, writeback=False):
        assert torch.equal(run.model.generate(prompt, **options).cpu(), expected)
    assert torch.equal(run.model.generate(prompt, synced_gpus=True, **options).cpu(), expected)


# accelerate loads sharded optimizer state into existing state, and a new optimizer has none. SGD needs none.
@pytest.mark.parametrize(
    ("state_dict_type", "optim"), [("FULL_STATE_DICT", "adamw_torch"), ("SHARDED_STATE_DICT", "sgd")]
)
@both_views
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_resumed_run_ends_as_the_undisturbed_one(
    rank, world_size, use_orig_params, state_dict_type, optim, tmp_path
):
    options = {"use_orig_params": use_orig_params, "state_dict_type": state_dict_type, "optim": optim}
    whole = trainer(rank, world_size, tmp_path, **options)
    whole.train()
    again = trainer(rank, world_size, tmp_path / "again", model=lambda: language_model(seed=1), **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert logged_losses(again)[-STEPS // 2 :] == logged_losses(whole)[-STEPS // 2 :]
    end = full_parameters(whole.model)
    for name, value in full_parameters(again.model).items():
        assert torch.equal(value, end[name]), name


@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_model_that_one_rank_holds_is_trained_on_all(rank, world_size, tmp_path):
    """Rank 1 builds the model on the meta device. Tied weights stay tied."""

    def model():
        with torch.device("cpu" if rank == 0 else "meta"):
            return language_model()

    run = trainer(rank, world_size, tmp_path, model=model, fsdp_config={"sync_module_states": True})
    run.train()
    plain, losses = trained_reference(world_size)
    assert logged_losses(run) == pytest.approx(losses, abs=2e-4)
    assert_same_parameters(full_parameters(run.model), plain.state_dict())


@both_views
@pytest.mark.parametrize("max_shard_size", ["1GB", "5KB"], ids=["one file", "several files"])
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_files_of_a_pretrained_model_load_into_shards(rank, max_shard_size, use_orig_params, tmp_path):
    """The code of docs/checkpoints.md loads the files: each rank reads its half, tied weights included."""
    import fsdp_c
    from fsdp_c.wrap import ModuleWrapPolicy

    plain = language_model(seed=1)
    if rank == 0:
        plain.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "5KB")
    dist.barrier()
    module = language_model(seed=2)
    model = fsdp_c.FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({type(module.transformer.h[0])}),
        use_orig_params=use_orig_params,
        device_id=device(),
    )
    numels = []
    resolve = DefaultLoadPlanner.resolve_tensor

    def counted(planner, read_item):
        numels.append(read_item.lengths.numel())
        return resolve(planner, read_item)

    with mock.patch.object(DefaultLoadPlanner, "resolve_tensor", counted):
        exec(
            code_of_page("From Hugging Face's files"),
            {"fsdp_c": fsdp_c, "model": model, "path": str(tmp_path)},
        )
    with type(model).summon_full_params(model):
        values = {name: value.cpu() for name, value in model.module.state_dict().items()}
        assert_same_parameters(values, plain.state_dict())
    state = fsdp_c.checkpoint.model_state(model)
    assert sum(numels) == sum(state[name].local.numel() for name in state if name != "lm_head.weight")
