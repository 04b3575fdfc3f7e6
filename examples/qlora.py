"""QLoRA: adapters on bitsandbytes' frozen 4-bit weights, which are sharded in their packed form.

torchrun --nproc-per-node 2 examples/qlora.py
"""

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import ModuleWrapPolicy, split_frozen


def in_4_bits(layer):
    result = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
    result.load_state_dict(layer.state_dict())
    return result  # quantized when it is moved to its device


def build_model(device):
    # in your script: from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True, ...))
    torch.manual_seed(0)
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **config))
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.model.set_submodule(name, in_4_bits(layer))
    return get_peft_model(model.to(device), LoraConfig(r=8, target_modules="all-linear"))


def batch(step, rank):
    return torch.randint(1, 64, (4, 16), generator=torch.Generator().manual_seed(2 * step + rank))


def main():
    dist.init_process_group("gloo")
    rank, device = (
        dist.get_rank(),
        torch.device("cpu"),
    )  # on GPUs: "nccl", and torch.device("cuda", LOCAL_RANK)
    with (
        split_frozen()
    ):  # one unit per layer: 4-bit weights and adapters are all-gathered together, only adapters reduced
        model = FSDP(
            build_model(device), auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=device
        )
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)
    for step in range(4):
        tokens = batch(step, rank).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
