"""What compression of gradients remembers under ``smddp_fsdp`` is in checkpoints, and goes on in each layout.

A step takes ``lr`` times what was sent. That is the mean of the gradients, and what was remembered, without what is
remembered then. So from one point on, where gradients are equal, ``parameter - lr * remembered`` is equal, however
values are rounded, and whoever remembers what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_trainer_ranks
from tests.sharding.test_fsdp import Block, fully_sharded
from tests.sharding.test_fsdp_fabric import launched
from tests.strategies.learners import Learner, make_trainer, samples, silent

LR = 0.5
COMPRESSION = {"method": "int8", "block_size": 16}
STRATEGIES = {
    "smddp_fsdp": lambda: fully_sharded(compression=COMPRESSION),
    "hybrid": lambda: fully_sharded(compression=COMPRESSION, sharding="hybrid", shard_size=2),
    "smddp": lambda: silent(compression=COMPRESSION),
}


class Stepping(Learner):
    """Each step of each rank sees the same samples: gradients are equal for any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.blocks[0].register_parameter("odd", nn.Parameter(torch.randn(3, 5)))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def loss(self, batch: Any) -> Any:
        hidden = self.frozen(self.blocks(batch[0]))
        return super().loss([hidden, batch[1]]) + self.blocks[0].odd.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(samples(4), batch_size=4)


def fit(strategy: str, steps: int, path: Path | None, save: Path) -> None:
    trainer = make_trainer(STRATEGIES[strategy](), max_steps=steps, max_epochs=-1, use_distributed_sampler=False)
    trainer.fit(Stepping(), ckpt_path=path)
    trainer.save_checkpoint(save)


def fit_each(runs: list[tuple[str, int, Path | None, Path]]) -> None:
    for run in runs:
        fit(*run)


def invariant(path: Path | str) -> dict[str, Tensor]:
    """Of each trained parameter what does not depend on how values were rounded."""
    checkpoint = torch.load(path, weights_only=True)
    remembered = checkpoint["smddp"]["error_feedback"]
    return {name: checkpoint["state_dict"][name].flatten() - LR * lost for name, lost in remembered.items()}


def compare(path: Path, expected: Path) -> None:
    names = [name for name, parameter in Stepping().named_parameters() if parameter.requires_grad]
    found = invariant(path)
    assert sorted(found) == sorted(names)
    torch.testing.assert_close(found, invariant(expected), rtol=0, atol=2e-6)


def forget(path: Path | str, without: Path | str) -> None:
    """Copy a checkpoint without what is remembered, after a look that it is something."""
    checkpoint = torch.load(path, weights_only=True)
    lost = torch.cat(list(checkpoint["smddp"].pop("error_feedback").values()))
    assert lost.abs().max() > 1e-4
    torch.save(checkpoint, without)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The run is not continued exactly")
@pytest.mark.parametrize("nodes", [pytest.param("ab", marks=pytest.mark.exhaustive), "aabb"])
def test_it_goes_on_in_each_layout(nodes: str, tmp_path: Path) -> None:
    others = ["smddp"] if len(nodes) == 2 else ["smddp", "hybrid"]
    strategies = ["smddp_fsdp", *others]
    first = {strategy: tmp_path / f"{strategy}-first.ckpt" for strategy in strategies}
    whole = {strategy: tmp_path / f"{strategy}-whole.ckpt" for strategy in strategies}
    runs: list[Any] = [(strategy, 3, None, first[strategy]) for strategy in strategies]
    runs += [(strategy, 4, None, whole[strategy]) for strategy in strategies]
    # From smddp_fsdp to each, and from each to smddp_fsdp.
    runs += [(strategy, 4, first["smddp_fsdp"], tmp_path / f"to-{strategy}.ckpt") for strategy in strategies]
    runs += [("smddp_fsdp", 4, first[strategy], tmp_path / f"from-{strategy}.ckpt") for strategy in others]
    run_trainer_ranks(fit_each, len(nodes), runs, node_ids=list(nodes))
    for strategy in strategies:
        compare(tmp_path / f"to-{strategy}.ckpt", whole["smddp_fsdp"])
    for strategy in others:
        compare(tmp_path / f"from-{strategy}.ckpt", whole[strategy])
    # On another number of nodes, and without what is remembered.
    forget(first["smddp_fsdp"], tmp_path / "without.ckpt")
    runs = [("smddp_fsdp", 4, first["smddp_fsdp"], tmp_path / "fewer.ckpt")]
    runs += [("smddp_fsdp", 4, tmp_path / "without.ckpt", tmp_path / "forgotten.ckpt")]
    run_trainer_ranks(fit_each, 3, runs, node_ids=list("abc"))
    compare(tmp_path / "fewer.ckpt", whole["smddp_fsdp"])
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        compare(tmp_path / "forgotten.ckpt", whole["smddp_fsdp"])


def save_in_a_loop(path: str) -> None:
    """With Fabric: three steps, a file, and a fourth step; then the fourth one again, from the file."""
    for steps, start, end in ((3, None, path), (4, None, f"{path}-whole"), (4, path, f"{path}-resumed")):
        fabric = launched("smddp_fsdp", compression=COMPRESSION)
        module = nn.Sequential(Block(8), Block(8))
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            nn.init.normal_(parameter, generator=generator)
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=LR))
        strategy = fabric.strategy
        done = 0
        if start is not None:
            loaded = fabric.load(start, {"model": model})
            strategy.load_communication_state(loaded["smddp"])
            done = 3
        for _ in range(done, steps):
            fabric.backward(model(torch.ones(2, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(end, {"state_dict": model, "model": model, "smddp": strategy.communication_state()})
        strategy.teardown()


@pytest.mark.slow
def test_fabric(tmp_path: Path) -> None:
    path = str(tmp_path / "first.ckpt")
    run_trainer_ranks(save_in_a_loop, 2, path, node_ids=["a", "b"])
    torch.testing.assert_close(invariant(f"{path}-resumed"), invariant(f"{path}-whole"), rtol=0, atol=2e-6)
    forget(path, f"{path}-without")
