"""``Trainer(strategy="smddp_fsdp")``: what it holds, says and refuses; ``test_numbers.py`` has its numbers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_smddp._compat.fsdp import whole_parameters
from tests.ranks import run_trainer_ranks
from tests.sharding.learners import Tied, Validating, fully_sharded
from tests.strategies.learners import Learner, make_trainer
from tests.strategies.pipeline_learners import Cases, call
from tests.strategies.test_options import parse


def train_root_alone() -> list[Tensor]:
    found = []
    for compression in (None, "bf16"):
        model = Learner()
        torch.manual_seed(5)
        model.net = nn.Linear(8, 3)  # a module that has no unit of its own
        make_trainer(fully_sharded(compression=compression), max_steps=1).fit(model)
        found.append(model.net.weight.detach().clone())
    return found


def test_compression_is_of_parameters_outside_of_units_too() -> None:
    for exact, compressed in EVERYDAY.results((train_root_alone,)):
        assert not torch.equal(exact, compressed)
        torch.testing.assert_close(exact, compressed, rtol=0.05, atol=1e-2)


class Holding(Callback):
    """Notes how much memory of whole parameters there is, when all are divided."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {"train": set(), "validation": set()}

    def note(self, trainer: Any, when: str) -> None:
        parameters = whole_parameters(trainer.lightning_module)
        self.seen[when].add(sum(parameter.untyped_storage().nbytes() for _, parameter in parameters))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.note(trainer, "train")

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.note(trainer, "validation")


def memory_held(sharding: str) -> tuple[dict[str, set[int]], int]:
    model, holding = Validating(), Holding()
    make_trainer(fully_sharded(sharding=sharding), max_epochs=2, callbacks=[holding]).fit(model)
    return holding.seen, sum(p.numel() * p.itemsize for p in model.parameters())


def test_memory_stays_between_steps_where_all_of_it_is_needed_again():
    (seen, size), _ = EVERYDAY.results((memory_held, "grad_op"))
    (seen_in_full, _), _ = EVERYDAY.results((memory_held, "full"))
    assert min(seen["train"]) >= size
    assert seen["validation"] == {0}
    assert seen_in_full == {"train": {0}, "validation": {0}}


def table(**options: Any) -> str:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_smddp.strategies.tables.say", lambda text, _: said.append(text))
        make_trainer(fully_sharded(verbose=True, **options), max_epochs=1).fit(Tied())
    return "\n".join(said)


def table_of_given_units() -> str:
    return table(wrap=["net.0", nn.Embedding], cpu_offload=True, sharding="grad_op", activation_checkpointing="offload")


HELD = [(memory_held, "grad_op"), (memory_held, "full")]
EVERYDAY = Cases(call, [(train_root_alone,), *HELD, (table,), (table_of_given_units,)])


def test_the_table_says_what_is_whole_when():
    first, other = EVERYDAY.results((table,))
    assert other == ""
    for text in ("2 on cpu, 2 to a copy", "net.0 ... blocks.2", "gathered for forward and again", "shared memory"):
        assert text in first


def test_ranks_of_each_node_share_memory():
    first, *_ = run_trainer_ranks(table, 4, node_ids=["a", "b", "a", "b"])
    assert "shared memory in each node, the backend between ranks of equal local rank" in first.replace("\n", "")


def test_units_that_are_given():
    first, _ = EVERYDAY.results((table_of_given_units,))
    assert "1 (net.0), gathered for forward, kept for backward" in first.replace("\n", "")
    assert "embed stays with the root" in first
    assert "cpu_offload=True changes nothing" in first
    assert "activation_checkpointing='offload' changes nothing" in first


def test_units_from_the_command_line(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # it warns of Lightning's use of it
    monkeypatch.setattr(sys, "argv", ["train.py"])
    strategy = "--trainer.strategy=lightning_smddp.SMDDPFSDPStrategy"
    made = parse(strategy, "--trainer.strategy.wrap=[Linear]", "--trainer.logger=false", "--trainer.accelerator=cpu")
    assert made._sharding.wrap == ["Linear"]
