"""``strategy="smddp_deepspeed"``: the numbers of one process, and its checkpoints.

DeepSpeed's import takes seconds: one start of ranks trains all cases, and each test looks at one.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smddp import SMDDPDeepSpeedStrategy
from lightning_smddp.deepspeed import start
from lightning_smddp.strategies.deepspeed_checks import require_elementwise, require_supported_module
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, make_trainer

RANKS, BATCH = 2, 4


class AdamLearner(Learner):
    """AdamW on two groups, with a schedule; five batches an epoch, so that accumulation ends with a single one."""

    def __init__(self, batch_size: int = BATCH, count: int = 40) -> None:
        super().__init__(batch_size, count)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        first = {"params": self.net[0].parameters(), "lr": 0.05}
        optimizer = torch.optim.AdamW([first, {"params": self.net[2].parameters()}], lr=0.01, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class SgdLearner(AdamLearner):
    """Gradients that are too small show in the weights, as they do not with Adam."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


CASES: dict[str, tuple[type[Learner], int, dict[str, Any]]] = {
    f"{name}, stage {stage}": (learner, stage, options)
    for stage in (2,)
    for name, learner, options in (
        ("accumulation", SgdLearner, {"accumulate_grad_batches": 2}),
        ("clipping", AdamLearner, {"gradient_clip_val": 0.1}),
    )
}


def train(strategy: Any, case: str, batch_size: int, folder: str) -> dict[str, Any]:
    """What a training leaves in its checkpoint, and what it logged."""
    make, _, options = CASES[case]
    model = make(batch_size)
    trainer = make_trainer(strategy, **options)
    trainer.fit(model)
    path = str(Path(folder) / f"{case}.ckpt")
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    saved = {key: saved[key] for key in ("state_dict", "optimizer_states", "global_step", "lr_schedulers")}
    return {"saved": saved, "metrics": metrics, "weights": dict(model.state_dict())}


def train_all(folder: str) -> dict[str, Any]:
    return {
        case: train(SMDDPDeepSpeedStrategy(stage=stage), case, BATCH, folder) for case, (_, stage, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank."""
    return run_trainer_ranks(train_all, RANKS, str(tmp_path_factory.mktemp("ranks")), timeout=180.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_one_process(results, tmp_path, case):
    expected = train("auto", case, RANKS * BATCH, str(tmp_path))
    for actual in (result[case] for result in results):
        for part in ("metrics", "saved", "weights"):
            torch.testing.assert_close(actual[part], expected[part], rtol=1e-5, atol=1e-6)


# ---- what is refused ----


class ByHand(Learner):
    automatic_optimization = False


class OwnBackward(Learner):
    def backward(self, loss: Any) -> None:
        (2 * loss).backward()


class OwnClipping(Learner):
    def configure_gradient_clipping(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ByHand(), {}, "ByHand has automatic_optimization=False"),
        (OwnBackward(), {}, "OwnBackward.backward would not be used.* return the loss that you want"),
        (OwnClipping(), {}, "OwnClipping.configure_gradient_clipping would not be used.* a norm"),
        (
            Learner(),
            {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.5},
            r"gradient_clip_val=0\.5\): .* norm",
        ),
    ],
)
def test_modules_that_ask_for_what_would_not_happen_are_refused(module, options, message):
    with pytest.raises(ValueError, match=message):
        require_supported_module(module, make_trainer("auto", **options))


def test_an_optimizer_that_looks_at_whole_parameters_is_refused():
    weights = torch.nn.Linear(3, 3).parameters()
    with pytest.raises(ValueError, match=r"Adafactor cannot be used .* a part of a parameter .*shard='optimizer'"):
        require_elementwise(torch.optim.Adafactor(weights))
    require_elementwise(torch.optim.AdamW(torch.nn.Linear(3, 3).parameters()))


# ---- in one process ----


def test_a_strategy_can_be_copied_and_sent():
    strategy = SMDDPDeepSpeedStrategy(stage=1)
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other.config == strategy.config


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"Run: pip install 'lightning-smddp\[deepspeed\]'"):
        SMDDPDeepSpeedStrategy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 0}, r"stage is 0. Valid: 1 .* To shard nothing, use strategy='smddp'"),
        ({"config": {"train_batch_size": 8}}, r"config={'zero_optimization': {'stage': ...}} is 0. Valid: 1"),
        (
            {"config": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}},
            r"write Trainer\(accumulate_grad_batches=4\)",
        ),
    ],
)
def test_what_shards_nothing_or_is_the_trainers_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SMDDPDeepSpeedStrategy(**arguments)


def test_the_users_configuration_stays_as_it_is():
    config = {"zero_optimization": {"stage": 2}}
    strategy = SMDDPDeepSpeedStrategy(config=config)
    strategy.config["gradient_clipping"] = 1.0
    assert config == {"zero_optimization": {"stage": 2}}
