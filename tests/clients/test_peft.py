"""PEFT: LoRA adapters on a frozen model, in a custom script and in the transformers Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.clients.support import (
    TIMEOUT_S,
    assert_ours,
    assert_same_parameters,
    full_parameters,
    launched,
    require,
    train_reference,
)
from tests.ranks import both_views, device, on_ranks

require("peft", "transformers", "accelerate")

LIBRARY = "peft"
BATCH = 2  # per rank
LENGTH = 6
VOCABULARY = 30
STEPS = 4
EPSILON = 1e-4  # Adam's epsilon: gradients that are 0 except for rounding cause small updates


def language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=16, **sizes, **tokens))


def with_adapters(seed: int = 1) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base = language_model()
    torch.manual_seed(seed)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def tokens(step: int, world_size: int) -> Tensor:
    return torch.randint(
        VOCABULARY, (BATCH * world_size, LENGTH), generator=torch.Generator().manual_seed(step)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=1e-2, eps=EPSILON, weight_decay=0)


def whole_loss(model: nn.Module, step: int) -> Tensor:
    whole = tokens(step, dist.get_world_size())
    return model(input_ids=whole, labels=whole).loss


def trained_reference() -> tuple[nn.Module, list[float]]:
    plain = with_adapters()
    return plain, train_reference(plain, whole_loss, range(STEPS), optimizer=adam(plain))


def wrapped(model: nn.Module, use_orig_params: bool, by_block: bool = True) -> Any:
    """Wrap the model with one unit per block, which mixes frozen and trainable parameters, or by PEFT's
    policy, which separates them.
    """
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    policy = ModuleWrapPolicy({LlamaDecoderLayer}) if by_block else fsdp_auto_wrap_policy(model)
    found = FSDP(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=device())
    assert_ours(found)
    return found


def train(model: Any, rank: int, world_size: int) -> list[float]:
    optimizer, losses = adam(model), []
    for step in range(STEPS):
        mine = tokens(step, world_size).chunk(world_size)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return losses


@pytest.mark.parametrize("use_orig_params,by_block", [(True, True), (False, True), (False, False)])
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_adapters_train_as_unsharded_and_the_rest_stays(rank, world_size, use_orig_params, by_block):
    launched(rank, world_size)
    model = wrapped(with_adapters(), use_orig_params, by_block)
    plain, losses = trained_reference()
    assert train(model, rank, world_size) == pytest.approx(losses, rel=1e-5)
    found = full_parameters(model)
    assert_same_parameters(found, plain.state_dict())
    frozen = [name for name, param in plain.named_parameters() if not param.requires_grad]
    assert frozen and all(torch.equal(found[name], plain.state_dict()[name]) for name in frozen)


@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_adapters_are_saved_and_loaded_as_unsharded(rank, world_size, tmp_path):
    """PEFT strips the wrapper's prefix at the start of a name only, so the model is a single unit."""
    from peft import PeftModel, get_peft_model_state_dict

    launched(rank, world_size)
    FSDP = torch.distributed.fsdp.FullyShardedDataParallel
    model = FSDP(with_adapters(), use_orig_params=True, device_id=device())
    train(model, rank, world_size)
    plain, _ = trained_reference()
    found = full_parameters(model)
    assert_same_parameters(
        get_peft_model_state_dict(model, state_dict=found), get_peft_model_state_dict(plain)
    )
    if rank == 0:
        model.module.save_pretrained(tmp_path, state_dict=found)
    dist.barrier()
    loaded = PeftModel.from_pretrained(language_model(), tmp_path)
    assert_same_parameters(loaded.state_dict(), found)


@both_views
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_adapters_are_set_aside_and_merged_as_unsharded(rank, world_size, use_orig_params):
    """disable_adapter serves to evaluate the reference model. Merging writes into frozen parameters."""
    launched(rank, world_size)
    FSDP = torch.distributed.fsdp.FullyShardedDataParallel
    model = wrapped(with_adapters(), use_orig_params)
    train(model, rank, world_size)
    mine = tokens(9, world_size).chunk(world_size)[rank]
    with torch.no_grad():
        adapted = model(input_ids=mine).logits
        with model.module.disable_adapter():
            logits, expected = model(input_ids=mine).logits, language_model()(input_ids=mine).logits
            torch.testing.assert_close(logits.cpu(), expected)
        with FSDP.summon_full_params(model):
            model.module.merge_adapter()
        torch.testing.assert_close(model(input_ids=mine).logits, adapted, rtol=1e-5, atol=1e-6)
    moved = full_parameters(model)["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"]
    assert not torch.equal(moved, language_model().model.layers[0].self_attn.q_proj.weight)
