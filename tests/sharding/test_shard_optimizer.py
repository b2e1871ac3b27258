"""``SMDDPStrategy(shard="optimizer")``: what it refuses, and what it leaves; ``test_numbers.py`` has its numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.ranks import run_trainer_ranks
from tests.sharding.learners import AdamLearner, sharded
from tests.strategies.learners import make_trainer


class Failing(AdamLearner):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.shared = {p.data_ptr() for p in self.parameters()}
            raise RuntimeError("stop here")


def fail(folder: str) -> tuple[bool, bool]:
    """Whether parameters have memory of their own behind an error, and the optimizer has them."""
    model = Failing()
    saving = {"enable_checkpointing": True, "default_root_dir": folder, "callbacks": [OnExceptionCheckpoint(folder)]}
    trainer = make_trainer(sharded(), **saving)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ours, and Lightning's where there is an OnExceptionCheckpoint
        with pytest.raises(RuntimeError, match="stop here"):
            trainer.fit(model)
    assert not list(Path(folder).rglob("*.ckpt"))
    grouped = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    is_own = model.shared.isdisjoint(p.data_ptr() for p in model.parameters())
    return is_own, grouped == {id(p) for p in model.parameters()}


def ask_for_state() -> tuple[list[int], str]:
    """How many parameters have a state in the whole one, and what the optimizer itself says."""
    trainer = make_trainer(sharded(), max_epochs=1)
    trainer.fit(AdamLearner())
    whole = trainer.strategy.optimizer_state(trainer.optimizers[0])
    with pytest.raises(RuntimeError) as refused:
        trainer.optimizers[0].state_dict()
    return list(whole["state"]), str(refused.value)


def ask_and_fail(folder: str) -> tuple[Any, ...]:
    return *ask_for_state(), fail(folder)


def test_the_whole_state_is_asked_of_the_strategy_and_all_is_whole_after_an_error(tmp_path):
    """And no half checkpoint is written."""
    results = run_trainer_ranks(ask_and_fail, 2, str(tmp_path))
    assert [numbers for numbers, *_ in results] == [[0, 1, 2, 3], []]
    for _, message, are_whole in results:
        assert "With shard='optimizer' this rank has a share of AdamW's state" in message
        assert are_whole == (True, True)
