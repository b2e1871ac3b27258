"""Fabric with ``shard="optimizer"`` and with ``smddp_fsdp``: numbers and files of ``smddp``, a share of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp import SMDDPFabricFSDPStrategy, SMDDPFabricStrategy
from tests.ranks import run_each, run_trainer_ranks
from tests.sharding.learners import Block
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, samples
from tests.strategies.pipeline_learners import Cases, call
from tests.strategies.test_fabric import make_fabric, weights

MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "smddp": (SMDDPFabricStrategy, {}),
    "shard": (SMDDPFabricStrategy, {"shard": "optimizer"}),
    "smddp_fsdp": (SMDDPFabricFSDPStrategy, {}),
}

WAYS = [("smddp", "shard"), ("shard", "smddp"), ("shard", "shard"), ("smddp", "smddp_fsdp"), ("smddp_fsdp", "smddp")]


def launched(kind: str, package: str = "lightning.fabric", **options: Any) -> Any:
    strategy: Any = kind  # as its name, which the other package needs
    if package == "lightning.fabric" and kind in MAKERS:
        make, own = MAKERS[kind]
        strategy = make(**grouped(verbose=False, **own, **options))
    fabric = make_fabric(strategy, package)
    fabric.launch()
    return fabric


def network() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(INPUTS, 16), Block(16), Block(16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


def set_up(kind: str, lr: float = 0.01, **options: Any) -> tuple[Any, nn.Module, Any, Any]:
    fabric, module = launched(kind, **options), network()
    return fabric, module, *fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=lr))


def run(fabric: Any, model: Any, optimizer: Any, epochs: int) -> list[float]:
    """Accumulates two batches, clips, looks at gradients and writes to parameters. What it has seen."""
    seen = []
    loader = fabric.setup_dataloaders(DataLoader(samples(48), batch_size=4))
    for _ in range(epochs):
        for index, (inputs, targets) in enumerate(loader):
            stepping = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not stepping):
                fabric.backward(F.cross_entropy(model(inputs), targets))
            if stepping:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                seen += [p.grad.norm().item() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.module[0].bias.clamp_(-0.1, 0.1)
    model.eval()
    with torch.no_grad():
        seen += model(torch.ones(2, INPUTS)).flatten().tolist()
    model.train()
    return seen


def fit(kind: str, epochs: int, load: str | None = None, save: str | None = None) -> tuple[Tensor, Tensor, int]:
    """The weights and buffers, what the loop has seen, and elements of the optimizer's state on this rank."""
    fabric, module, model, optimizer = set_up(kind)
    state = {"model": model, "optimizer": optimizer, "epochs": 0}
    if load is not None:
        fabric.load(load, state)
    seen = run(fabric, model, optimizer, epochs)
    state["epochs"] += epochs
    if save is not None:
        fabric.save(save, state)
        fabric.barrier()
    held = 0
    for values in optimizer.state.values():
        held += sum(getattr(value, "_local_tensor", value).numel() for value in values.values())
    fabric.strategy.teardown()
    return weights(module), torch.tensor(seen), held


def save_and_go_on(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {kind: fit(kind, 2) for kind in MAKERS}
    for kind in MAKERS:
        fit(kind, 1, save=f"{folder}/{kind}.ckpt")
    for first, second in WAYS:
        results[f"{first} to {second}"] = fit(second, 1, load=f"{folder}/{first}.ckpt")
    return results


@pytest.mark.slow
def test_the_same_numbers_and_checkpoints_as_smddp(tmp_path: Path) -> None:
    for results in run_trainer_ranks(save_and_go_on, 2, str(tmp_path)):
        expected, seen, whole = results["smddp"]
        for way, (actual, saw, _) in results.items():
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7, msg=way)
            torch.testing.assert_close(saw, seen[-len(saw) :], rtol=1e-4, atol=1e-6, msg=way)
        assert max(results["shard"][2], results["smddp_fsdp"][2]) < 0.6 * whole
    plain, *others = (torch.load(tmp_path / f"{kind}.ckpt", weights_only=True) for kind in MAKERS)
    for other in others:
        torch.testing.assert_close(other, plain, rtol=1e-6, atol=1e-7)
        assert list(other["optimizer"]["state"]) == list(plain["optimizer"]["state"])


def train_two_modules(kind: str, package: str) -> Tensor:
    """As a GAN does, with an optimizer each, one of which looks at whole parameters; and evaluation in between."""
    fabric = launched(kind, package)
    torch.manual_seed(6)
    modules = [nn.Sequential(nn.Linear(INPUTS, 8), Block(8)), nn.Sequential(Block(8), nn.Linear(8, CLASSES))]
    generator, critic = (fabric.setup_module(module) for module in modules)
    optimizers = fabric.setup_optimizers(
        torch.optim.Adam(generator.parameters(), lr=0.01), torch.optim.Adafactor(critic.parameters(), lr=0.01)
    )
    for inputs, targets in fabric.setup_dataloaders(DataLoader(samples(48), batch_size=4)):
        made = generator(inputs)
        fabric.backward(F.cross_entropy(critic(made.detach()), targets))
        optimizers[1].step()
        optimizers[1].zero_grad()
        fabric.backward(-F.cross_entropy(critic(made), targets))
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    fabric.strategy.teardown()
    return torch.cat([weights(module) for module in modules])


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", [pytest.param("lightning.fabric", marks=pytest.mark.exhaustive), "lightning_fabric"]
)
def test_two_modules_in_both_namespaces(package: str) -> None:
    cases = [(kind, package) for kind in ("ddp", "smddp", "smddp_fsdp")]
    for expected, *actual in run_trainer_ranks(run_each, 2, train_two_modules, cases):
        for weights_of_kind in actual:
            torch.testing.assert_close(weights_of_kind, expected, rtol=1e-5, atol=1e-6)


def freeze_behind_backward() -> Tensor:
    """As training of two networks in turns does, with `requires_grad_(False)` before the other one's step."""
    fabric, module, model, optimizer = set_up("shard", lr=0.1)
    inputs, targets = next(iter(DataLoader(samples(8), batch_size=8)))
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    fabric.backward(F.cross_entropy(model(inputs), targets))
    module.requires_grad_(False)
    optimizer.step()
    found = torch.cat([p.detach().flatten() for p in module.parameters()])
    fabric.strategy.teardown()
    return found - before


def test_what_is_frozen_behind_its_backward_pass_is_stepped_on_all_ranks() -> None:
    moved, other = EVERYDAY.results((freeze_behind_backward,))
    assert torch.equal(moved, other)
    assert moved.abs().min() > 0.05


def without_a_module(fabric: Any) -> None:
    fabric.setup_optimizers(torch.optim.AdamW(network().parameters()))


def asked_alone(fabric: Any) -> None:
    module = network()
    _, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    optimizer.optimizer.state_dict()  # the user's own


def refused(act: Any, kind: str) -> str:
    fabric = launched(kind)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        act(fabric)
    fabric.strategy.teardown()
    return str(caught.value)


REFUSED = {
    (refused, without_a_module, "shard"): "With shard='optimizer' the module comes first",
    (refused, asked_alone, "shard"): "by `fabric.save` and `fabric.load`, on all ranks",
    (refused, without_a_module, "smddp_fsdp"): "AdamW has parameters of no module that was set up",
}
EVERYDAY = Cases(call, [(freeze_behind_backward,), *REFUSED])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_an_error_on_every_rank(case: Any) -> None:
    for message in EVERYDAY.results(case):
        assert REFUSED[case] in message
