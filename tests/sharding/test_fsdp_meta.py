"""``smddp_fsdp`` with layers that get memory when they are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.nn import functional as F

from lightning_smddp.strategies import fsdp_scheme
from tests.ranks import run_trainer_ranks
from tests.sharding.learners import Block, fully_sharded
from tests.strategies.learners import Learner, Outcome, assert_equal, make_trainer, outcome

BLOCKS = 8


class Late(Learner):
    """Makes its layers in ``configure_model``."""

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block(8) for _ in range(BLOCKS))
            self.head = nn.Linear(8, 3)
            self.register_buffer("offset", torch.ones(8))

    def loss(self, batch: Any) -> Any:
        x = batch[0] + self.offset
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x) + self.net(x), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def held(module: nn.Module) -> int:
    """Elements of parameters that this rank has memory for."""
    parts = (getattr(p, "to_local", lambda p=p: p)() for p in module.parameters())
    return sum(part.numel() for part in parts if not part.is_meta)


def fit_late(meta_init: bool, path: str | None = None, save: str | None = None) -> tuple[Outcome, int, int]:
    """What training left, the most elements that were held in setup, and how many the module has."""
    seed_everything(5, verbose=False)
    fill, most = fsdp_scheme.initialize_deferred, [0]

    def watched(module: nn.Module, *args: Any) -> None:
        fill(module, *args)
        most.append(held(module))

    fsdp_scheme.initialize_deferred = watched
    model = Late()
    trainer = make_trainer(fully_sharded(meta_init=meta_init), max_epochs=2 if path else 1)
    try:
        trainer.fit(model, ckpt_path=path)
    finally:
        fsdp_scheme.initialize_deferred = fill
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome(model, trainer), max(most), sum(p.numel() for p in model.parameters())


def fit_and_go_on(path: str) -> list[tuple[Outcome, int, int]]:
    """At first, and from then on without ``meta_init`` and with it."""
    return [fit_late(True, save=path), fit_late(False, path), fit_late(True, path)]


def first_values() -> Any:
    seed_everything(5, verbose=False)
    model = Late()
    make_trainer(fully_sharded(meta_init=True)).predict(model, model.train_dataloader())
    return {name: p.detach() for name, p in model.named_parameters()}


def on_two(path: str) -> tuple[Any, Any]:
    return fit_and_go_on(path), first_values()


@pytest.mark.slow
def test_no_rank_ever_holds_the_whole_and_first_values_do_not_depend_on_the_number_of_ranks(tmp_path):
    (first, two), (second, _) = run_trainer_ranks(on_two, 2, str(tmp_path / "late.ckpt"))
    for _, most, total in (first[0], second[0]):
        assert most < 0.75 * total  # its half, what has memory from the start, and a block
    torch.testing.assert_close(first[0][0].weights, second[0][0].weights, rtol=0, atol=0)
    (plain, *_), (meta, *_) = first[1:]
    assert_equal(meta, plain)
    three, *_ = run_trainer_ranks(first_values, 3)
    torch.testing.assert_close(two, three, rtol=0, atol=0)
    assert all(value.abs().sum() > 0 for name, value in two.items() if "mix" in name)
