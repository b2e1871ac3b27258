"""``PipelineStrategy(shard="optimizer")``: replicas of a stage share its optimizer, and numbers are those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp import PipelineStrategy
from lightning_smddp.sharding import optimizer_trial
from lightning_smddp.strategies.checks import refuse_training
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.layouts import WITHIN, Run, execute
from tests.strategies.learners import IN_ANOTHER_LAYOUT, RESUMING, make_trainer
from tests.strategies.pipeline_learners import Gpt, Net, assert_same, outcome
from tests.strategies.test_layouts import BETWEEN, check, check_start

BOTH = (None, "optimizer")
TWO_BY_TWO = {"pipeline_parallel_size": 2, "verbose": False}


class AdamNet(Net):
    """AdamW on two groups of named parameters, with a schedule."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [{"params": named[:3], "lr": 0.02}, {"params": named[3:]}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class WritingNet(AdamNet):
    """Changes its weights in hooks, in ways that must act once."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.99)
                p.data.clamp_(-0.5, 0.5)

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.net[0].bias.add_(0.01)
            self.net[6].weight.mul_(1.01)


class Tied(Gpt):
    """Embedding and head share a weight; all sequences are of one length."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def train_dataloader(self) -> Any:
        data = torch.randint(11, (16, 6), generator=torch.Generator().manual_seed(0))
        return DataLoader(data, batch_size=4)


class Thawing(Callback):
    """The last layer trains from the second epoch on."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[6].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[6].requires_grad_(trainer.current_epoch > 0)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a weight that two stages hold": (Tied, {}),
    "hooks that write, clipping, freezing": (WritingNet, {"gradient_clip_val": 0.1, "callbacks": Thawing}),
}


def train(case: str, shard: str | None) -> tuple[dict[str, Any], int]:
    """What training left, and how many elements of optimizer state this rank had."""
    make, options = CASES[case]
    if "callbacks" in options:
        options = {**options, "callbacks": [options["callbacks"]()]}
    torch.manual_seed(0)
    model = make()
    trainer = make_trainer(PipelineStrategy(**grouped(**TWO_BY_TWO, shard=shard)), **options)
    trainer.fit(model)
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    elements = sum(value.numel() for state in states for value in state.values() if torch.is_tensor(value))
    return outcome(model, trainer), elements


def train_both(case: str) -> list[tuple[dict[str, Any], int]]:
    return [train(case, shard) for shard in BOTH]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "nodes"), [*zip(CASES, ("aabb", "aaaa"), strict=True)], ids=str)
def test_the_same_numbers_as_without_sharding(case: str, nodes: str) -> None:
    """Between nodes shares of replicas are gathered."""
    results = run_trainer_ranks(train_both, 4, case, node_ids=list(nodes), timeout=110.0)
    for rank, ((expected, _), (actual, _)) in enumerate(results):
        assert_same(actual, expected, 1e-6, f"rank {rank}")
    unsharded, sharded = (sum(of_rank[index][1] for of_rank in results) for index in (0, 1))
    assert sharded < unsharded * (0.55 if nodes == "aaaa" else 1.0)


class TestCheckpoints:
    pytestmark = [pytest.mark.slow, *RESUMING, IN_ANOTHER_LAYOUT]

    def test_a_file_goes_on_with_it_and_a_directory_without(self, tmp_path: Path) -> None:
        file = Run("net", "2x2 shard", tmp_path)
        again = Run("net", "2x2 shard", tmp_path, sharded=True, ckpt_path=file.path(BETWEEN))
        unbroken, found = execute([file, again])
        check(again, found, unbroken)
        assert again.path(2 * WITHIN).is_dir()
        elsewhere = Run("net", "dp2", tmp_path, ckpt_path=again.path(2 * WITHIN))
        check_start(elsewhere, *execute([elsewhere]))  # within an epoch: other samples come


class ZeroRedundancyOptimizer(torch.optim.SGD):
    def consolidate_state_dict(self) -> None:
        """By which Lightning knows such optimizers."""


def test_optimizers_that_cannot_be_shared_are_refused() -> None:
    module = Net()
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer sends each parameter to all ranks"):
        refuse_training(module, (), [ZeroRedundancyOptimizer(module.parameters())])


class Own(torch.optim.SGD):
    """Not torch's class: what it does is tried."""

    steps_of_copies = 0

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            Own.steps_of_copies += 1
        return super().step(closure)


class OwnNet(Net):
    def configure_optimizers(self) -> Any:
        return Own(self.parameters(), lr=0.01)


def fit_own() -> int:
    make_trainer(PipelineStrategy(shard="optimizer", pipeline_parallel_size=1)).fit(OwnNet())
    return Own.steps_of_copies


def test_an_optimizer_is_tried_once() -> None:
    one_trial = 3 * optimizer_trial._STEPS  # of all parameters, and of each half
    assert run_trainer_ranks(fit_own, 2) == [one_trial, one_trial]


def test_more_than_the_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="shard='full' is unknown. Valid: 'optimizer', None"):
        PipelineStrategy(shard="full")
