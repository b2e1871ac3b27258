"""Data parallelism on 1, 2 and 4 devices, and on 2 x 2: the same training as on one device with the whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_smddp import Compression
from tests.devices import kinds, on_gpus
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.learners import RESUMING, AllSteps, Learner, make_trainer, overflow_in_third_batch, silent
from tests.strategies.pipeline_learners import assert_same
from tests.strategies.resuming import Scenario, resume_from_each
from tests.strategies.test_nonfinite import BAD_STEP, fails, skips
from tests.strategies.test_pipeline_features import scaled

pytestmark = RESUMING


class Classifier(AllSteps, Learner):
    """All four steps; a rank's batch is its share of one process's."""

    def __init__(self, ranks: int, recomputes: bool = False) -> None:
        super().__init__(batch_size=8 // ranks)
        self.recomputes = recomputes

    def loss(self, batch: list[Tensor]) -> Tensor:
        if not self.recomputes:
            return super().loss(batch)
        hidden = checkpoint(self.net[:2], batch[0], use_reentrant=False)
        return torch.nn.functional.cross_entropy(self.net[2](hidden), batch[1])


class Overflowing(Classifier):
    def on_train_start(self) -> None:
        overflow_in_third_batch(self)


@dataclass(frozen=True)
class Item:
    """One training.

    Attributes:
        name: of the test.
        strategy: arguments of ``SMDDPStrategy``.
        trainer: arguments of the ``Trainer``.
        tolerance: of the comparison with one device.
        kind: what is special: "", "recomputes", "overflows", "all steps".
    """

    name: str
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    kind: str = ""

    def run(self, alone: bool, ranks: int) -> dict[str, Any]:
        """What training and the other steps gave."""
        options = dict(self.trainer)
        if self.kind == "overflows":
            options["plugins"] = [scaled(init_scale=2.0**12, growth_interval=3)]
        model = (Overflowing if self.kind == "overflows" else Classifier)(ranks, self.kind == "recomputes")
        strategy = "auto" if alone else silent(**self.strategy)
        trainer = make_trainer(strategy, use_distributed_sampler=False, **options)
        trainer.fit(model)
        found: dict[str, Any] = {"weights": {name: p.detach().clone() for name, p in model.named_parameters()}}
        found["steps"] = trainer.global_step
        found["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self.kind == "all steps":
            found["tested"] = [*trainer.validate(model, verbose=False), *trainer.test(model, verbose=False)]
            found["rows"] = sum(len(rows) for rows in trainer.predict(model)) * (1 if alone else ranks)
        return found


ALGORITHMS = [Item(name, {"algorithm": name}) for name in ("auto", "native", "hierarchical", "balanced")]
COMPRESSIONS = [
    Item("bf16", {"compression": Compression("bf16", scope="all")}, tolerance=0.05),
    Item("fp16", {"compression": Compression("fp16", scope="all")}, tolerance=0.01),
    Item("int8", {"compression": Compression("int8", scope="all")}, tolerance=0.05),
    # Of a rank as high as that of its matrices: exact but for rounding.
    Item("powersgd", {"compression": Compression("powersgd", scope="all", rank=8)}, tolerance=1e-3),
    Item("int8 between nodes", {"compression": "int8"}, tolerance=0.05),
]
FEATURES = [
    Item("accumulation", trainer={"accumulate_grad_batches": 2}),
    Item("clipping by norm", trainer={"gradient_clip_val": 0.1}),
    Item("clipping by value", trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Item("bf16-mixed", trainer={"precision": "bf16-mixed"}, tolerance=0.02),
    Item("16-mixed with an overflow", trainer={"gradient_clip_val": 0.5}, tolerance=5e-3, kind="overflows"),
    Item("activation checkpointing", kind="recomputes"),
    Item("validate, test, predict", kind="all steps"),
]


def train_each(items: Sequence[Item], alone: bool, ranks: int) -> list[dict[str, Any]]:
    return [item.run(alone, ranks) for item in items]


def check(items: Sequence[Item], nodes: str) -> None:
    """Each item on these nodes' ranks, one after the other, against one device."""
    ranks = len(nodes)
    (expected,) = run_trainer_ranks(train_each, 1, items, True, 1)
    results = run_trainer_ranks(train_each, ranks, items, False, ranks, node_ids=list(nodes), timeout=100)
    for rank, found in enumerate(results):
        for item, of_rank, of_first, of_one in zip(items, found, results[0], expected, strict=True):
            assert_same(of_rank, of_one, item.tolerance, f"{item.name}, rank {rank}")
            assert_same(of_rank["weights"], of_first["weights"], 0.0, f"{item.name}, rank {rank}")


SLOW, REST = pytest.mark.slow, pytest.mark.exhaustive
# What `make test` runs on two simulated devices: the other items take their ways there, or are of several nodes.
ON_TWO = [COMPRESSIONS[0], COMPRESSIONS[3], FEATURES[4], FEATURES[6]]
MORE_ON_TWO = [item for item in [*ALGORITHMS, *FEATURES, *COMPRESSIONS] if item not in ON_TWO]
OTHER_SPREAD = [*ALGORITHMS[:3], *COMPRESSIONS[:4], FEATURES[0], FEATURES[4]]
RUNS: dict[str, tuple[Sequence[Item], str, list[pytest.MarkDecorator]]] = {
    "one, few": (ALGORITHMS[:1], "a", []),
    "one, rest": (FEATURES[3:], "a", [REST]),
    "two, few": (ON_TWO, "aa", [SLOW]),
    "two, rest": (MORE_ON_TWO, "aa", [REST]),
    "two nodes of one": ([*ALGORITHMS, *COMPRESSIONS], "ab", [REST]),
    "four": ([*ALGORITHMS, COMPRESSIONS[2]], "aaaa", [REST]),
    "two nodes of two, few": ([ALGORITHMS[3], COMPRESSIONS[4]], "aabb", [SLOW]),
    "two nodes of two, rest": (OTHER_SPREAD, "aabb", [REST]),
}


def on_devices(runs: dict[str, tuple[Sequence[Item], str, list[pytest.MarkDecorator]]]) -> Any:
    """Run a test of ``items`` and ``nodes`` on simulated devices and on GPUs."""
    params = [
        pytest.param(items, nodes, kind, marks=[mark, *marks], id=f"{name}-{kind}")
        for name, (items, nodes, marks) in runs.items()
        for kind, mark in kinds(len(nodes)).items()
    ]
    return pytest.mark.parametrize(("items", "nodes", "device"), params)


@on_devices(RUNS)
def test_the_same_training(items: list[Item], nodes: str, device: str) -> None:
    check(items, nodes)


@on_gpus(2)
def test_shared_memory_is_refused(device: str) -> None:
    with pytest.raises(RanksFailedError, match="algorithm='shared_memory' cannot be used"):
        run_trainer_ranks(train_each, 2, [Item("", {"algorithm": "shared_memory"})], False, 2)


# ---- gradients that are no numbers ----


@pytest.mark.slow
@on_gpus(2)
@pytest.mark.parametrize("name", ["smddp", pytest.param("pipeline", marks=pytest.mark.exhaustive)])
def test_nan_is_an_error_or_skipped(name: str, device: str) -> None:
    results = run_trainer_ranks(fails, 2, name, {}, 1, float("nan"), {})
    assert results[1][1] == BAD_STEP  # another stage may have taken the step meanwhile
    for message, _ in results:
        assert name == "smddp" or "on rank 1 (host" in message  # averages tell no rank, and its loss is finite
        assert "net.2.bias (nan in 1 of 3 elements)" in message
    assert [skipped for _, skipped, _ in run_trainer_ranks(skips, 2, name, {})] == [1, 1]


# ---- going on ----


@pytest.mark.slow
@on_gpus(2)
@pytest.mark.parametrize("kind", ["smddp", {}], ids=["smddp", "pipeline"])
def test_resumes_with_the_devices_random_states(kind: Any, device: str, tmp_path: Path) -> None:
    """To the bit, with dropout, which each device draws from a generator of its own."""
    scenario = Scenario(accumulate=2, validate=2, epochs=2)
    times = 2 if device == "gpu" else 1
    assert run_trainer_ranks(resume_from_each, 2, kind, scenario, str(tmp_path), times, timeout=100) == [{}, {}]
