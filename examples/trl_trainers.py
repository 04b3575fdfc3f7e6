"""TRL's SFTTrainer and DPOTrainer, with FSDP in their arguments as for transformers' Trainer.

torchrun --nproc-per-node 2 -m fsdp_c examples/trl_trainers.py sft
torchrun --nproc-per-node 2 -m fsdp_c examples/trl_trainers.py dpo
"""

import copy
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

OPTIONS = {
    "fsdp": True,
    "fsdp_config": {"version": 1, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "bf16": torch.cuda.is_available(),
}


def byte_tokenizer():
    vocabulary = {
        byte: index for index, byte in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def build_model():  # in your script: AutoModelForCausalLM.from_pretrained(...)
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, **config))


def sft(model, tokenizer):
    data = Dataset.from_dict({"text": [f"{n} and {n} are {2 * n}." for n in range(16)]})
    return SFTTrainer(model, SFTConfig("runs/sft", **OPTIONS), train_dataset=data, processing_class=tokenizer)


def dpo(model, tokenizer):
    rows = [{"prompt": f"{n} and {n} are", "chosen": f" {2 * n}.", "rejected": f" {n}."} for n in range(16)]
    return DPOTrainer(
        model,
        copy.deepcopy(model),  # reference model, wrapped like the trained model
        DPOConfig("runs/dpo", **OPTIONS),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    {"sft": sft, "dpo": dpo}[sys.argv[1]](build_model(), byte_tokenizer()).train()
