"""``SMDDPFabricStrategy(shard="optimizer")``: the same numbers as without it, and checkpoints that load either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp import SMDDPFabricStrategy
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import samples
from tests.strategies.test_fabric import make_fabric, network, weights

BOTH = (None, "optimizer")


def launched(shard: str | None) -> Any:
    fabric = make_fabric(SMDDPFabricStrategy(**grouped(shard=shard, verbose=False)))
    fabric.launch()
    return fabric


def train(fabric: Any, model: Any, optimizer: Any, epochs: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(samples(48), batch_size=4))
    for _ in range(epochs):
        for inputs, targets in loader:
            fabric.backward(F.cross_entropy(model(inputs), targets))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.module[0].bias.clamp_(-0.1, 0.1)


def fit(shard: str | None, epochs: int, load: str | None = None, save: str | None = None) -> tuple[Tensor, int]:
    """The weights, and elements of the optimizer's state on this rank."""
    fabric = launched(shard)
    module = network()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "epochs": 0}
    if load is not None:
        fabric.load(load, state)
    train(fabric, model, optimizer, epochs)
    state["epochs"] += epochs
    if save is not None:
        fabric.save(save, state)
        fabric.barrier()
    found = weights(module), sum(v.numel() for s in optimizer.state.values() for v in s.values())
    fabric.strategy.teardown()
    assert torch.equal(weights(module), found[0])
    return found


def freeze_behind_backward() -> Tensor:
    """As training of two networks in turns does, with `requires_grad_(False)` before the other one's step."""
    fabric = launched("optimizer")
    module = network()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    inputs, targets = next(iter(DataLoader(samples(8), batch_size=8)))
    before = weights(module)
    fabric.backward(F.cross_entropy(model(inputs), targets))
    module.requires_grad_(False)
    optimizer.step()
    found = weights(module)
    fabric.strategy.teardown()
    return found - before


def test_what_is_frozen_behind_its_backward_pass_is_stepped_on_all_ranks() -> None:
    moved, other = run_trainer_ranks(freeze_behind_backward, 2)
    assert torch.equal(moved, other)
    assert moved.abs().min() > 0.05


def save_and_go_on(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {str(shard): fit(shard, 2) for shard in BOTH}
    for first in BOTH:
        path = f"{folder}/{first}.ckpt"
        fit(first, 1, save=path)
        for second in BOTH:
            results[f"{first} to {second}"] = fit(second, 1, load=path)
    return results


@pytest.mark.slow
def test_the_same_numbers_and_checkpoints_as_without_it(tmp_path: Any) -> None:
    for results in run_trainer_ranks(save_and_go_on, 2, str(tmp_path)):
        expected, whole = results["None"]
        for way, (actual, _) in results.items():
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7, msg=way)
        assert results["optimizer"][1] < 0.6 * whole
    sharded, plain = (torch.load(tmp_path / f"{shard}.ckpt", weights_only=True) for shard in ("optimizer", None))
    torch.testing.assert_close(sharded, plain, rtol=1e-6, atol=1e-7)
    assert list(sharded["optimizer"]["state"]) == list(plain["optimizer"]["state"])


def without_a_module() -> None:
    fabric = launched("optimizer")
    fabric.setup_optimizers(torch.optim.AdamW(network().parameters()))


def asked_alone() -> None:
    fabric = launched("optimizer")
    module = network()
    optimizer = torch.optim.AdamW(module.parameters())
    fabric.setup(module, optimizer)
    optimizer.state_dict()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without_a_module, "With shard='optimizer' the module comes first"),
        (asked_alone, "by `fabric.save` and `fabric.load`, on all ranks"),
    ],
)
def test_what_cannot_be_is_an_error_on_every_rank(body: Any, message: str) -> None:
    with pytest.raises(RanksFailedError, match=message) as failed:
        run_trainer_ranks(body, 2)
    assert set(failed.value.tracebacks) == {0, 1}
    assert not failed.value.hung
