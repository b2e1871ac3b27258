"""Models that are too large for a device, or in parts for a host."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_smddp.pipeline.partition import costs
from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Evaluated, Net, assert_same

RANK = "RANK"


class TooLarge(Net):
    """Its step is out of memory, as on a device that is too small."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        super().loss(batch)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def run_short() -> list[str]:
    texts: list[str] = []
    layouts: list[dict[str, Any]] = [{"num_microbatches": 2}, {"num_microbatches": 1}]
    for layout in layouts:
        try:
            Bench({**layout}).fit(TooLarge(), max_epochs=1)
        except torch.OutOfMemoryError as error:
            texts.append(str(error))
    return texts


def fit_on_small_hosts() -> tuple[list[str], int, list[str], list[str]]:
    """Warnings; parameters without memory after fit; the error of going on; what is said where devices are short."""
    costs.available_host_bytes = lambda: 0.0 if os.environ[RANK] == "1" else 1e15
    model, trainer = Evaluated(), Bench({}).trainer(max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model)
    absent = sum(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Bench({}).trainer(max_epochs=1).fit(model)
    return [str(each.message) for each in caught], absent, [str(error.value)], run_short()


def test_parts_stay_where_a_host_has_too_little_memory() -> None:
    for rank, (messages, absent, errors, short) in enumerate(run_trainer_ranks(fit_on_small_hosts, 2)):
        assert 0 < absent < 8
        assert any("Evaluated stays in parts" in message for message in messages) == (rank == 0)
        assert "had too little memory for the whole of it" in errors[0]
        assert len(short) == 2
        for text in short:
            assert text.startswith("CUDA out of memory. Tried to allocate 20.00 GiB. This was a run of the step")
            assert "meta_init=True" in text
            assert "num_microbatches" in text


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
