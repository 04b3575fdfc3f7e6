"""Weight transfer from sharded trainers to an inference engine in another process, as in frameworks for
reinforcement learning.

torchrun --nproc-per-node 2 examples/weight_sync.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c.wrap import ModuleWrapPolicy

SLOTS, SLOT_NBYTES = 2, 32 * 1024  # real models need "1GB", and at least the largest tensor


def build_model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(32, 10)).eval()


def engine(slots, free, requests):
    """Answer generation requests and load weights from shared memory, until the request None."""
    torch.set_num_threads(1)
    model = build_model()
    weights = model.state_dict()
    while (request := requests.recv()) is not None:
        kind, content = request
        if kind == "weights":
            slot, tensors = content
            # with vLLM: load_weights([(name, weight), ...])
            for name, begin, end, dtype, shape in tensors:
                weights[name].copy_(slots[slot][begin:end].view(dtype).view(shape))
            free.release()
        else:
            with torch.no_grad():
                requests.send(model(content))


class Sender:
    """Rank 0's side of the shared memory."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.slots = torch.empty(SLOTS, SLOT_NBYTES, dtype=torch.uint8).share_memory_()
        self.free, self.slot, self.tensors, self.used = context.Semaphore(SLOTS), 0, [], 0
        self.requests, other = context.Pipe()
        self.process = context.Process(target=engine, args=(self.slots, self.free, other), daemon=True)
        self.process.start()

    def put(self, name, weight):
        data = weight.contiguous().view(-1).view(torch.uint8)
        if self.used + len(data) > SLOT_NBYTES:
            self.hand_over()
        # waits while the engine loads the other slot
        if not self.tensors and not self.free.acquire(timeout=60):
            raise RuntimeError("the engine loads no weights any more")
        begin, end = self.used, self.used + len(data)
        self.slots[self.slot, begin:end].copy_(data)
        self.tensors.append((name, begin, end, weight.dtype, weight.shape))
        self.used = end

    def hand_over(self):
        self.requests.send(("weights", (self.slot, self.tensors)))
        self.slot, self.tensors, self.used = (self.slot + 1) % SLOTS, [], 0


def sync(trainer, sender):
    """Send all weights. Meanwhile one unit is unsharded, the previous one is copied into a slot, and the
    engine loads the other slot.
    """
    # with an engine in bf16, dtype=torch.bfloat16 also all-gathers in bf16
    for name, weight in fsdp_c.iter_full_params(trainer, rank0_only=True, max_nbytes=SLOT_NBYTES):
        sender.put(name, weight)
    if sender:
        sender.hand_over()


def rollout(prompts, sender):
    """Return the engine's outputs for this rank's prompts."""
    asked = [torch.empty_like(prompts) for _ in range(dist.get_world_size())] if sender else None
    dist.gather(prompts, asked)
    if sender:
        sender.requests.send(("generate", torch.cat(asked)))
    logits = torch.empty(*prompts.shape[:2], 10, device=prompts.device)
    dist.scatter(
        logits, list(sender.requests.recv().to(logits.device).split(len(prompts))) if sender else None
    )
    return logits


def main():
    dist.init_process_group("gloo")
    device = torch.device("cpu")  # on GPUs: "nccl", and torch.device("cuda", LOCAL_RANK)
    sender = Sender() if dist.get_rank() == 0 else None
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    trainer = FSDP(build_model(), auto_wrap_policy=policy, device_id=device)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    prompts = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)

    for step in range(4):
        actions = rollout(prompts, sender).argmax(-1)  # actions of the weights of the last step
        loss = nn.functional.cross_entropy(trainer(prompts).flatten(0, 1), actions.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync(trainer, sender)
        with torch.no_grad():
            difference = (trainer(prompts) - rollout(prompts, sender)).abs().max().item()
        if sender:
            print(f"step {step}: loss {loss.item():.4f}, trainer and engine differ by {difference}")
    if sender:
        sender.requests.send(None)
        sender.process.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
