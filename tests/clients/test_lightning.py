"""Lightning's Trainer with FSDPStrategy: automatic wrapping, configure_model, checkpoints, resuming on a
different number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.clients.lightning_models import (
    Layer,
    adam,
    assert_trained_as_unsharded,
    batch,
    manually_wrapped,
    mlp,
    on_cpu,
    whole_loss,
)
from tests.clients.support import TIMEOUT_S, assert_ours, full_parameters, launched, require
from tests.ranks import both_views, device_type, on_ranks, pool

require("lightning")

LIBRARY = "lightning"
HERE = "tests.clients.test_lightning"
EPOCH = 3  # number of steps
TWO_EPOCHS = [*range(EPOCH)] * 2


def lit_module(seed: int = 0, by_hand: bool = False) -> Any:
    """Return a LightningModule around the model. With ``by_hand`` it builds and wraps the model in
    configure_model.
    """
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Module | None = None if by_hand else mlp(seed)
            self.losses: list[Tensor] = []

        def configure_model(self) -> None:
            if self.model is None:
                self.model = manually_wrapped(mlp(seed))

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = F.mse_loss(self.model(batch[0]), batch[1])
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("val_loss", F.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.trainer.model)

    return Lit()


def loader(rank: int, world_size: int) -> DataLoader:
    """Return the loader of an epoch. DistributedSampler assigns samples round-robin, so that each step has
    the samples of ``batch(step)``.

    Lightning's own sampler for training shuffles.
    """
    inputs, targets = zip(*(batch(step) for step in range(EPOCH)), strict=True)
    data = TensorDataset(torch.cat(inputs), torch.cat(targets))
    sampler = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(data, batch_size=len(inputs[0]) // world_size, sampler=sampler)


def trainer(rank: int, world_size: int, folder: Path, options: dict[str, Any], **arguments: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import FSDPStrategy

    launched(rank, world_size)
    return Trainer(
        accelerator=device_type(),
        devices=world_size,
        strategy=on_cpu(FSDPStrategy)(**options),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )


def mean_losses(run: Any, module: Any) -> list[float]:
    return run.strategy.reduce(torch.stack(module.losses)).tolist()


def parameters_of(run: Any) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in full_parameters(run.strategy.model).items()}


@pytest.mark.parametrize("by_hand", [False, True], ids=["policy", "configure_model"])
@both_views
@on_ranks(2, TIMEOUT_S, LIBRARY)
def test_trained_and_validated_as_unsharded(rank, world_size, use_orig_params, by_hand, tmp_path):
    options = {"use_orig_params": use_orig_params} | ({} if by_hand else {"auto_wrap_policy": {Layer}})
    run, module = trainer(rank, world_size, tmp_path, options, max_epochs=2), lit_module(by_hand=by_hand)
    run.fit(module, loader(rank, world_size), loader(rank, world_size))
    assert_ours(run.strategy.model)
    found = parameters_of(run)
    assert_trained_as_unsharded(mean_losses(run, module), found, TWO_EPOCHS)
    plain = mlp()
    plain.load_state_dict(found)
    with torch.no_grad():
        expected = sum(whole_loss(plain, step).item() for step in range(EPOCH)) / EPOCH
    assert run.callback_metrics["val_loss"].item() == pytest.approx(expected, rel=1e-5)
    if by_hand:  # otherwise Lightning drops the root after a fit, and only inner units are left
        (result,) = run.validate(module, loader(rank, world_size), verbose=False)
        assert result["val_loss"] == pytest.approx(expected, rel=1e-5)


def trained_and_saved(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> list[float]:
    policy = {"auto_wrap_policy": {Layer}}
    run, module = trainer(rank, world_size, folder, options | policy, max_epochs=1), lit_module()
    run.fit(module, loader(rank, world_size))
    run.save_checkpoint(folder / "checkpoint")
    return mean_losses(run, module)


def resumed(
    rank: int, world_size: int, folder: Path, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    policy = {"auto_wrap_policy": {Layer}}
    run, module = trainer(rank, world_size, folder, options | policy, max_epochs=2), lit_module(seed=1)
    run.fit(module, loader(rank, world_size), ckpt_path=folder / "checkpoint", weights_only=False)
    return mean_losses(run, module), parameters_of(run)


# No case for the full state dict of flat parameters: Lightning numbers the parameters, which torch and fsdp_c
# refuse for flat ones.
@pytest.mark.parametrize(("use_orig_params", "kind"), [(True, "full"), (True, "sharded"), (False, "sharded")])
def test_run_resumed_on_another_number_of_ranks_ends_as_the_unsharded_one(tmp_path, use_orig_params, kind):
    """2 ranks save after the first of two epochs, and 3 ranks resume."""
    arguments = {"folder": tmp_path, "options": {"use_orig_params": use_orig_params, "state_dict_type": kind}}
    before = pool(2, LIBRARY).run(HERE, "trained_and_saved", arguments, TIMEOUT_S)[0]
    after, parameters = pool(3, LIBRARY).run(HERE, "resumed", arguments, TIMEOUT_S)[0]
    assert_trained_as_unsharded(before + after, parameters, TWO_EPOCHS)
