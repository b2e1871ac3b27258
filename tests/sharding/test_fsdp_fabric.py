"""``Fabric(strategy="smddp_fsdp")``: the same numbers and files as ``smddp``, with a share of the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp import SMDDPFabricFSDPStrategy, SMDDPFabricStrategy
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.sharding.test_fsdp import Block
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, samples
from tests.strategies.test_fabric import make_fabric, weights

MAKERS = {"smddp": SMDDPFabricStrategy, "smddp_fsdp": SMDDPFabricFSDPStrategy}


def launched(strategy: str, **options: Any) -> Any:
    fabric = make_fabric(MAKERS[strategy](**grouped(verbose=False, **options)))
    fabric.launch()
    return fabric


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(INPUTS, 16), Block(16), Block(16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


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


def fit(strategy: str, epochs: int, load: str | None = None, save: str | None = None) -> tuple[Tensor, Tensor, int]:
    """The weights and buffers, what the loop has seen, and elements of the optimizer's state on this rank."""
    fabric = launched(strategy)
    module = network()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
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
    results: dict[str, Any] = {strategy: fit(strategy, 2) for strategy in MAKERS}
    for first, second in (("smddp", "smddp_fsdp"), ("smddp_fsdp", "smddp"), ("smddp_fsdp", "smddp_fsdp")):
        path = f"{folder}/{first}.ckpt"
        fit(first, 1, save=path)
        results[f"{first} to {second}"] = fit(second, 1, load=path)
    return results


@pytest.mark.slow
def test_the_same_numbers_and_checkpoints_as_smddp(tmp_path: Any) -> None:
    for results in run_trainer_ranks(save_and_go_on, 2, str(tmp_path)):
        expected, seen, whole = results["smddp"]
        for way, (actual, saw, _) in results.items():
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=way)
            torch.testing.assert_close(saw, seen[-len(saw) :], rtol=1e-4, atol=1e-6, msg=way)
        assert results["smddp_fsdp"][2] < 0.6 * whole
    sharded, plain = (torch.load(tmp_path / f"{strategy}.ckpt", weights_only=True) for strategy in MAKERS)
    torch.testing.assert_close(sharded, plain, rtol=1e-5, atol=1e-6)
    assert list(sharded["optimizer"]["state"]) == list(plain["optimizer"]["state"])


def train_two_modules(strategy: str, package: str) -> Tensor:
    """As a GAN does, with an optimizer each, one of which looks at whole parameters; and evaluation in between."""
    fabric = make_fabric(strategy, package)
    fabric.launch()
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


def train_both_ways(package: str) -> list[Tensor]:
    return [train_two_modules(strategy, package) for strategy in MAKERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", [pytest.param("lightning.fabric", marks=pytest.mark.exhaustive), "lightning_fabric"]
)
def test_two_modules_in_both_namespaces(package: str) -> None:
    for expected, actual in run_trainer_ranks(train_both_ways, 2, package):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def without_a_module() -> None:
    fabric = launched("smddp_fsdp")
    fabric.setup_optimizers(torch.optim.AdamW(network().parameters()))


def bad_gradients() -> None:
    fabric = launched("smddp_fsdp", sharding="grad_op")
    module = network()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(model(torch.ones(4, INPUTS)).sum() * float("nan" if fabric.global_rank else 1))
    optimizer.step()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without_a_module, "AdamW has parameters of no module that was set up"),
        (bad_gradients, r"on rank 1 .* the loss \(nan\)"),
    ],
)
def test_what_cannot_be_is_an_error_on_every_rank(body: Any, message: str) -> None:
    with pytest.raises(RanksFailedError, match=message) as failed:
        run_trainer_ranks(body, 2)
    assert set(failed.value.tracebacks) == {0, 1}
    assert not failed.value.hung
