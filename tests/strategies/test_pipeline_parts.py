"""Models that are too large for a device, or in parts for a host."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_smddp.pipeline.partition import costs
from tests.ranks import run_trainer_ranks
from tests.strategies.pipeline_learners import Bench, Evaluated, assert_same

RANK = "RANK"


def fit_on_small_hosts(path: str) -> tuple[list[str], int, list[str]]:
    """Warnings; parameters without memory after fit; the error of going on."""
    costs.available_host_bytes = lambda: 0.0 if os.environ[RANK] == "1" else 1e15
    model, trainer = Evaluated(), Bench({}).trainer(max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model)
    absent = sum(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Bench({}).trainer(max_epochs=1).fit(model)
    return [str(each.message) for each in caught], absent, [str(error.value)]


def test_parts_stay_where_a_host_has_too_little_memory(tmp_path: Path) -> None:
    for rank, (messages, absent, errors) in enumerate(run_trainer_ranks(fit_on_small_hosts, 2, str(tmp_path))):
        assert 0 < absent < 8
        assert any("Evaluated stays in parts" in message for message in messages) == (rank == 0)
        assert "had too little memory for the whole of it" in errors[0]


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
