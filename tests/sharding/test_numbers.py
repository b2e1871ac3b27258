"""``shard="optimizer"`` and ``smddp_fsdp`` train to the numbers of data parallelism."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from tests.ranks import run_each, run_trainer_ranks
from tests.sharding import learners
from tests.sharding.learners import fully_sharded, sharded
from tests.strategies.learners import Learner, Outcome, assert_equal, make_trainer, outcome, silent
from tests.strategies.test_pipeline_features import scaled

pytestmark = pytest.mark.filterwarnings("ignore:Gradients are not finite")
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


def averaging(callback: Any) -> dict[str, Any]:
    return {"callbacks": lambda: [callback()], "max_epochs": 3}


# What is called has to be new in each training.
SCALER = {"plugins": lambda: [scaled(init_scale=2.0**12, growth_interval=3)], "gradient_clip_val": 0.5}
SWA = averaging(lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1))
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "groups and a schedule": (learners.AdamLearner, {}),
    "tied weights": (learners.Tied, {}),
    "layouts of memory": (learners.Convolution, {}),
    "groups, a schedule, clipping by norm": (learners.AdamLearner, {"gradient_clip_val": 0.1}),
    "clipping by norm": (learners.Tied, {"gradient_clip_val": 0.1}),
    "accumulation": (learners.Tied, {"accumulate_grad_batches": 2}),
    "accumulation, clipping by value": (learners.AdamLearner, {"accumulate_grad_batches": 2, **BY_VALUE}),
    "16-bit": (learners.AdamLearner, {"precision": "bf16-true"}),
    "mixed": (learners.AdamLearner, {"precision": "bf16-mixed"}),
    "BatchNorm, mixed": (learners.Convolution, {"precision": "bf16-mixed"}),
    "a gradient scaler": (learners.Overflowing, SCALER),
    "hooks that write, clipping by value": (learners.Regularized, BY_VALUE),
    "hooks that write": (learners.Writing, {}),
    "hooks of the optimizer": (learners.StepHooks, {}),
    "outside of units": (learners.Outside, {}),
    "looking at gradients": (learners.Looking, {}),
    "blocks in attributes": (learners.Attributes, {}),
    "whole parameters": (learners.Factored, {}),
    "all parameters": (learners.AllAtOnce, {}),
    "other optimizers": (learners.Others, {}),
    "unfreezing": (Learner, {"callbacks": lambda: [learners.Unfreezing()]}),
    "a group that comes later": (learners.LastLayer, {"callbacks": lambda: [learners.Adding()]}),
    "unused parameters": (learners.Unused, {}),
    "a skipped step": (learners.BadBatch, {}),
    "two optimizers": (learners.Adversaries, {}),
    "closures": (learners.Closures, {}),
    "frozen in turn": (learners.InTurn, {}),
    "an average": (learners.Validating, averaging(lambda: EMAWeightAveraging(decay=0.7))),
    "stochastic weight averaging": (learners.Validating, SWA),
}
UNUSED = (
    learners.Tied, Learner, learners.Unused, learners.LastLayer, learners.Adversaries, learners.Closures,
    learners.InTurn,
)  # fmt: skip
TOLERANCES = {"16-bit": 0.05, "mixed": 0.05, "BatchNorm, mixed": 0.05}  # sums of three ranks in another order


def train(case: str, make_strategy: Any, options: dict[str, Any]) -> Outcome:
    make, trainer_options = CASES[case]
    fresh = {key: value() if callable(value) else value for key, value in trainer_options.items()}
    mode = "skip" if case == "a skipped step" else "error"
    model, trainer = make(), make_trainer(make_strategy(on_nonfinite=mode, **options), **{"max_epochs": 2, **fresh})
    trainer.fit(model)
    finite = [loss for loss in model.losses if not math.isnan(loss)]
    assert len(model.losses) - len(finite) == (case == "a skipped step")
    model.losses = finite
    return outcome(model, trainer)


@functools.cache
def plain(case: str) -> Outcome:
    return train(case, silent, {"find_unused_parameters": CASES[case][0] in UNUSED})


def train_both(kind: str, cases: list[str], options: dict[str, Any]) -> dict[str, list[Outcome]]:
    found = {}
    for case in cases:
        if kind == "fsdp":
            found[case] = [plain(case), train(case, fully_sharded, options)]
        else:
            found[case] = [plain(case), train(case, sharded, {"find_unused_parameters": CASES[case][0] in UNUSED})]
    return found


# Norms of shares are summed in another order. One bit of it moves the loss of `Tied` by more than 1e-7, without any
# sharding; that of `AdamLearner` it does not.
SHARD_FEW = ["groups and a schedule", "whole parameters", "tied weights", "groups, a schedule, clipping by norm"]
SHARD_OTHERS = [
    "accumulation, clipping by value", "a gradient scaler", "two optimizers", "closures", "other optimizers",
    "hooks of the optimizer", "a skipped step", "an average", "stochastic weight averaging",
]  # fmt: skip
# Of parameters that three ranks cannot have equal parts of.
UNEVEN = ["whole parameters", "hooks that write", "a group that comes later", "layouts of memory"]
FEW = ["groups and a schedule", "clipping by norm", "blocks in attributes"]
# On more ranks, or in others: "clipping by norm" has tied weights, "looking at gradients" is outside of units.
ELSEWHERE = ["tied weights", "accumulation", "outside of units", "layouts of memory"]
OTHERS = [
    "16-bit", "mixed", "BatchNorm, mixed", "hooks that write, clipping by value", "looking at gradients",
    "whole parameters", "all parameters", "other optimizers", "unfreezing", "unused parameters", "a skipped step",
    "two optimizers", "closures", "frozen in turn",
]  # fmt: skip
# Averages of weights, and validation: `test_checkpoints.py`.
# Whose units stay whole, and of whose parameters three ranks have unequal parts.
WHOLE_MEANWHILE = ["layouts of memory", "looking at gradients", "two optimizers", "frozen in turn"]
GRAD_OP, HYBRID = {"sharding": "grad_op"}, {"sharding": "hybrid", "shard_size": 2}
SLOW, REST = pytest.mark.slow, pytest.mark.exhaustive
# Ranks of as many nodes, with what they train in one start.
RUNS: dict[str, tuple[str, list[tuple[str, list[str], dict[str, Any]]], Any]] = {
    "few": ("aa", [("shard", SHARD_FEW, {}), ("fsdp", FEW, {})], SLOW),
    "others": ("aa", [("shard", SHARD_OTHERS, {}), ("fsdp", OTHERS, {})], SLOW),
    "three ranks": ("aaa", [("shard", UNEVEN, {}), ("fsdp", WHOLE_MEANWHILE, GRAD_OP)], SLOW),
    "three ranks, rest": ("aaa", [("fsdp", ELSEWHERE, GRAD_OP)], REST),
    "two nodes": ("aabb", [("shard", UNEVEN[:2], {})], SLOW),
    "replicas": ("aaaa", [("fsdp", ["accumulation"], HYBRID)], SLOW),
    "over nodes": ("abba", [("fsdp", ["groups and a schedule", "mixed"], {})], SLOW),
    "over single ranks": ("abc", [("fsdp", ["tied weights"], GRAD_OP)], SLOW),
    "replicas between nodes": ("aabb", [("fsdp", FEW[:1], HYBRID)], REST),
    "replicas in nodes": ("abab", [("fsdp", FEW[:1], HYBRID)], REST),
    "devices": ("aa", [("fsdp", ["clipping by norm", "an average"], {})], [SLOW, pytest.mark.simulated_cuda]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("run", [pytest.param(run, marks=marks) for run, (_, _, marks) in RUNS.items()])
def test_the_numbers_of_data_parallelism(run: str) -> None:
    nodes, trained, _ = RUNS[run]
    everyones = run_trainer_ranks(run_each, len(nodes), train_both, trained, node_ids=list(nodes), timeout=220.0)
    for of_rank in everyones:
        for (kind, *_), results in zip(trained, of_rank, strict=True):
            default = 1e-5 if kind == "fsdp" else 1e-6 if nodes == "aabb" else 1e-7
            for case, (expected, actual) in results.items():
                try:
                    assert_equal(actual, expected, tolerance=TOLERANCES.get(case, default))
                except AssertionError as error:
                    raise AssertionError(f"{kind}, {case}: {error}") from None


@pytest.mark.slow
def test_gradients_between_nodes_in_16_bits() -> None:
    (case, *_), options = FEW, {**HYBRID, "compression": "bf16"}
    for results in run_trainer_ranks(train_both, 4, "fsdp", [case], options, node_ids=list("aabb")):
        expected, actual = results[case]
        assert_equal(actual, expected, tolerance=0.05)
        assert actual.weights["net.0.weight"].ne(expected.weights["net.0.weight"]).any()
