"""Models that are too large for a device, in parts for a host, or never whole on a rank."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp.pipeline.partition import costs
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer
from tests.strategies.pipeline_learners import Bench, Evaluated, assert_same

RANK = "RANK"


def fit_on_small_hosts() -> tuple[list[str], int, str]:
    """Warnings; parameters without memory after fit; the error of going on."""
    costs.available_host_bytes = lambda: 0.0 if os.environ[RANK] == "1" else 1e15
    model, trainer = Evaluated(), Bench({}).trainer(max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model)
    absent = sum(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Bench({}).trainer(max_epochs=1).fit(model)
    return [str(each.message) for each in caught], absent, str(error.value)


def test_parts_stay_where_a_host_has_too_little_memory() -> None:
    for rank, (messages, absent, error) in enumerate(run_trainer_ranks(fit_on_small_hosts, 2)):
        assert 0 < absent < 8
        assert any("Evaluated stays in parts" in message for message in messages) == (rank == 0)
        assert "had too little memory for the whole of it" in error


def fit_on_small_devices() -> list[Any]:
    """One device seems to be smaller than the others, so the model is never whole on any of them."""
    if os.environ[RANK] == "1":
        costs.free_device_bytes = lambda _: 0.0
    model, trainer = Evaluated(), Bench({}).trainer(max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(model)
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    return [dict(model.state_dict()), devices]


@pytest.mark.slow
@pytest.mark.simulated_cuda
def test_a_model_that_fits_on_some_devices_only() -> None:
    """Ranks that decided for themselves waited for each other for ever."""
    model = Evaluated()
    Bench().trainer(max_epochs=1, accelerator="cpu").fit(model)
    for weights, devices in run_trainer_ranks(fit_on_small_devices, 2):
        assert devices == ["cpu"]
        assert_same(weights, dict(model.state_dict()))


# ---- models that are never whole on a rank ----

WIDTH = 8
WITHOUT_SANITY_CHECK = {"num_sanity_val_steps": 0}


class Block(nn.Module):
    """With a parameter of its own, a buffer, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * self.scale + self.shift


class Configured(LightningModule):
    """Makes its layers in ``configure_model``."""

    depth = 4

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))
        self.head = nn.Linear(WIDTH, 3)
        self.born_whole = not any(parameter.is_meta for parameter in self.parameters())

    def step(self, batch: list[Tensor]) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def loader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, WIDTH, generator=generator)
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)

    train_dataloader = val_dataloader = loader


def saved(
    directory: str, options: dict[str, Any], trainer_options: dict[str, Any] | None = None, ckpt_path: str | None = None
) -> Any:
    """Train, with checkpoints: metrics, names of what is here, whether it was born whole, the file."""
    from lightning_smddp import PipelineStrategy

    torch.manual_seed(7)
    module, checkpoint = Configured(), ModelCheckpoint(directory, save_top_k=-1)
    strategy = PipelineStrategy(**grouped(num_microbatches=4, verbose=False, **options))
    more = {"enable_checkpointing": True, "limit_val_batches": 1, **(trainer_options or {})}
    trainer = make_trainer(strategy, callbacks=[checkpoint], **more)
    trainer.fit(module, ckpt_path=ckpt_path)
    here = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, here, module.born_whole, checkpoint.best_model_path


def saved_and_resumed(directory: str, ckpt_path: str) -> tuple[Any, Any]:
    """From the start, divided by the validation step, and from a checkpoint on."""
    whole = saved(f"{directory}/whole", {"meta_init": True, "activation_checkpointing": True})
    return whole, saved(f"{directory}/rest", {"meta_init": True}, WITHOUT_SANITY_CHECK, ckpt_path)


def assert_in_parts(results: list[Any]) -> None:
    """Each parameter is on one rank, from the start to the end."""
    assert not any(born_whole for _, _, born_whole, _ in results)
    names = [name for _, here, _, _ in results for name in here]
    assert len(names) == len(set(names)) == 4 * 5 + 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # where a run goes on in another number of stages
@pytest.mark.filterwarnings("ignore:The run is not continued exactly")
def test_a_model_without_memory_is_the_same_for_any_number_of_stages_and_resumes(tmp_path: Path) -> None:
    """Also with activation checkpointing; and from a checkpoint of another number of stages."""
    on_two = run_trainer_ranks(saved, 2, str(tmp_path / "two"), {"meta_init": True}, WITHOUT_SANITY_CHECK)
    first = next(path for path in (tmp_path / "two").iterdir() if "epoch=0" in path.name)
    on_three = run_trainer_ranks(saved_and_resumed, 3, str(tmp_path / "three"), str(first))
    three = [whole for whole, _ in on_three]
    assert_in_parts(on_two)
    assert_in_parts(three)
    for metrics, *_ in [*on_two, *three, *(resumed for _, resumed in on_three)]:
        torch.testing.assert_close(metrics, on_two[0][0], rtol=1e-5, atol=1e-6)
    states = [torch.load(results[0][3], weights_only=True) for results in (on_two, three)]
    torch.testing.assert_close(states[0]["state_dict"], states[1]["state_dict"], rtol=1e-5, atol=1e-6)
    assert list(states[0]["state_dict"]) == list(plain_keys())


def plain_keys() -> Any:
    module = Configured()
    module.configure_model()
    return module.state_dict()
