"""Lightning's Trainer with FSDPStrategy. The script itself needs no change for fsdp_c.

torchrun --nproc-per-node 2 -m fsdp_c examples/lightning_fsdp.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)
        self.model = nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(32, 10))

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.print(f"step {index}: loss {self.all_gather(loss.detach()).mean().item()!r}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)  # parameters of the wrapped model


if __name__ == "__main__":
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(64, 8, 32), torch.randint(10, (64, 8)))
    strategy = FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}, state_dict_type="sharded")
    trainer = Trainer(
        devices=2, strategy=strategy, max_epochs=1, logger=False, default_root_dir="runs/lightning"
    )
    trainer.fit(Encoder(), DataLoader(data, batch_size=8))
