"""Rules of combining micro-batches, one by one, without a Trainer."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection, R2Score, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import CharErrorRate
from torchmetrics.wrappers import MetricTracker

from lightning_smddp.bridge.capture import StepCapture
from lightning_smddp.bridge.logged_values import reduce_values, whole_batch_size
from lightning_smddp.bridge.step_results import StepResults
from tests.strategies.steps import Module, run, whole

# ---- logged values ----


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3.5),
        ({"reduce_fx": "AVG"}, 3.5),
        ({"reduce_fx": torch.max}, 6.5),
        ({"reduce_fx": min}, 1.0),
        ({"reduce_fx": "sum"}, 11.5),
    ],
)
def test_values_are_combined_by_reduce_fx(options: dict[str, Any], expected: float) -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.log("x", rows.mean(), prog_bar=True, **options)

    module = Module(step)
    run(module, [3, 3, 2])  # means are 1, 4, 6.5
    assert module.values == [("x", expected)]
    assert module.logged[0][2]["prog_bar"] is True


@pytest.mark.parametrize(
    ("rule", "expected"), [("mean", 3.5), ("sum", 11.5), ("max", 6.5), ("min", 1.0), ("last", 6.5)]
)
def test_rules_come_before_reduce_fx(rule: Any, expected: float) -> None:
    module = Module(lambda self, rows: self.log("x", rows.mean().item(), reduce_fx="sum"))
    run(module, [3, 3, 2], rules={"x": rule})
    assert module.values == [("x", pytest.approx(expected))]


def test_means_of_equal_values_and_of_integers() -> None:
    third = torch.tensor([1 / 3] * 3)
    assert reduce_values("mean", list(third), [3, 3, 1]).equal(third[0])
    assert reduce_values("mean", [0.1, 0.1, 0.1], [3, 3, 1]) == 0.1
    assert reduce_values("mean", [torch.tensor(1), torch.tensor(2)], [1, 3]).item() == 1.75
    assert reduce_values("mean", [torch.tensor([1.0]), 3], [1, 1]).equal(torch.tensor(2.0))
    assert reduce_values("max", [True, False], [1, 1]) is True
    assert math.isnan(reduce_values("mean", [math.nan], [0.0]))  # a micro-batch of which nothing counts
    assert math.isnan(float(reduce_values("mean", [torch.tensor(math.nan)], [0.0])))


def test_calls_keep_their_number_and_order() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.log("twice", 1.0)
        if rows[0] > 2:
            self.log("sometimes", rows[0])
        self.log(value=2.0, name="twice")
        self.log_dict({"a": 0.0, "b": True})

    module = Module(step)
    run(module, [3, 1, 3])
    assert module.values == [("twice", 1.0), ("sometimes", 3.75), ("twice", 2.0), ("a", 0.0), ("b", True)]


def test_a_value_is_what_it_was_when_it_was_logged() -> None:
    def step(self: Module, rows: Tensor) -> None:
        total = rows.sum()
        self.log("before", total, reduce_fx="sum")
        total.zero_()

    module = Module(step)
    run(module, [2, 2])
    assert module.values == [("before", 6.0)]


def test_batch_sizes_add_up_unless_they_are_the_whole_batchs() -> None:
    assert whole_batch_size([3, 3, 2], [3, 3, 2], None) == (8, None)
    assert whole_batch_size([30, 10], [2, 2], None) == (40, None)
    assert whole_batch_size([8, 8], [4, 4], None) == (8, 8)
    assert whole_batch_size([8, 8], [2, 2], 8) == (8, 8)
    assert whole_batch_size([4], [4], None) == (4, None)


def test_tokens_weigh_means() -> None:
    module = Module(lambda self, rows: self.log("x", rows[0], batch_size=30 if rows[0] else 10))
    run(module, [2, 2])
    assert module.logged == [("x", 1.5, {"batch_size": 40, "reduce_fx": "mean"})]


class Refused(Exception):  # noqa: N818
    """Lightning's own answer to a wrong call."""


@pytest.mark.parametrize("call", [("x", "text"), ("x", torch.zeros(2)), ("x", 1.0, "unknown"), ("x", MeanMetric())])
def test_what_cannot_be_logged_is_left_to_lightning(call: tuple[Any, ...]) -> None:
    class Strict(Module):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            raise Refused

    reduce_fx = {"reduce_fx": call[2]} if len(call) > 2 else {}
    module = Strict(lambda self, rows: self.log(*call[:2], **reduce_fx))
    capture = StepCapture(module)
    with capture.microbatch(0, 1, keep=False):
        module.step(module, torch.zeros(1))
    with pytest.raises(Refused), capture.microbatch(0, 1):
        module.step(module, torch.zeros(1))


def test_groups_of_the_users_own_are_refused() -> None:
    module = Module(lambda self, rows: self.log("x", 1.0, sync_dist_group=object()))
    with pytest.raises(ValueError, match="Leave `sync_dist_group` out"), StepCapture(module).microbatch(0, 1):
        module.step(module, torch.zeros(1))


# ---- metrics ----


def assert_like_whole(step: Callable[..., Any], make: Callable[[], dict[str, nn.Module]], sizes: list[int]) -> None:
    """States, counts, caches and logged values are those of one call."""
    actual, expected = Module(step, **make()), Module(step, **make())
    for _ in range(2):
        run(actual, sizes)
        whole(expected, sum(sizes))
    assert actual.values == expected.values
    for (name, mine), (_, theirs) in zip(actual.named_modules(), expected.named_modules(), strict=True):
        if hasattr(mine, "metric_state") and not isinstance(mine, MetricCollection):
            torch.testing.assert_close(mine.metric_state, theirs.metric_state, msg=name)
            assert mine.update_count == theirs.update_count
            torch.testing.assert_close(mine._forward_cache, theirs._forward_cache, msg=name)


def test_arguments_of_any_number_of_rows() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.cat(rows[rows > 2])
        self.cat.update(rows.repeat_interleave(2))

    assert_like_whole(step, lambda: {"cat": CatMetric()}, [2, 2, 3])


def test_lists_of_texts_keywords_and_constants() -> None:
    weights = torch.tensor([1.0, 2.0])

    def step(self: Module, rows: Tensor) -> None:
        texts = [str(value) for value in rows.tolist()]
        self.text.update(texts, target=[text[::-1] for text in texts])
        self.mean.update(weights, weight=weights)
        self.log("text", self.text)

    def make() -> dict[str, nn.Module]:
        return {"text": CharErrorRate(), "mean": MeanMetric()}

    module = Module(step, **make())
    run(module, [2, 2, 1])
    assert module.mean.update_count == 1
    reference = Module(step, **make())
    whole(reference, 5)
    assert module.values == reference.values


def test_numbers_as_arguments() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.mean(rows.mean(), weight=len(rows))
        self.seconds(rows.mean().item())
        self.total((rows > 2).sum())

    assert_like_whole(step, lambda: {"mean": MeanMetric(), "seconds": MeanMetric(), "total": SumMetric()}, [3, 3, 2])


def test_a_rule_for_sums_of_floats() -> None:
    module = Module(lambda self, rows: self.total(rows.sum()), total=SumMetric())
    run(module, [3, 2], rules={"total": "sum"})
    assert module.total.compute().item() == 10.0


def test_compute_and_reset_in_the_step() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.error.update(rows, rows**2)
        self.log("so far", self.error.compute())
        self.squares.reset()
        self.squares(rows, rows + 1)
        self.log("this batch", self.squares.compute())

    assert_like_whole(step, lambda: {"error": MeanSquaredError(), "squares": MeanSquaredError()}, [2, 2, 1])


def test_each_call_shows_its_own_value() -> None:
    """Lightning reads a metric's value of the step when it is logged."""
    seen = []

    class Reading(Module):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            seen.append((name, value._forward_cache.item()))

    def step(self: Module, rows: Tensor) -> None:
        for name in ("first", "second"):
            self.mean(rows if name == "first" else -rows)
            self.log(name, self.mean)

    run(Reading(step, mean=MeanMetric()), [2, 2])
    assert seen == [("first", 1.5), ("second", -1.5)]


def test_values_of_metrics_in_outputs_lists_and_attributes() -> None:
    def step(self: Module, rows: Tensor) -> Any:
        value = self.worst(rows, rows**2)
        self.found.append({"worst": value})
        self.last = value
        return {"worst": value, "rows": rows, "both": self.pair(rows, rows**2)}

    def make() -> Module:
        module = Module(step, worst=R2Score(), pair=MetricCollection([MeanSquaredError(), R2Score()]))
        module.found, module.last = [], None
        return module

    actual, expected = make(), make()
    torch.testing.assert_close(run(actual, [2, 1, 1]), whole(expected, 4))  # R2Score refuses less than two rows
    torch.testing.assert_close((actual.found, actual.last), (expected.found, expected.last))


def test_collections_keep_their_groups() -> None:
    def make() -> dict[str, nn.Module]:
        return {"both": MetricCollection([MulticlassAccuracy(3), MulticlassAccuracy(3, average="micro")][:1])}

    def step(self: Module, rows: Tensor) -> None:
        self.both.update(rows.long() % 3, rows.long() % 2)
        self.log_dict(self.both)

    assert_like_whole(step, make, [2, 2, 1])


def test_a_tracker_and_its_copies() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.log("x", self.tracker(rows, rows**2))

    actual, expected = (Module(step, tracker=MetricTracker(MeanSquaredError(), maximize=False)) for _ in range(2))
    capture = StepCapture(actual)
    for _ in range(2):
        for module in (actual, expected):
            module.tracker.increment()
        run(actual, [2, 2], capture)
        whole(expected, 4)
    assert actual.values == expected.values
    assert actual.tracker.compute_all().equal(expected.tracker.compute_all())


def test_arguments_that_do_not_fit_are_named() -> None:
    module = Module(lambda self, rows: self.cat.update(torch.zeros(2, len(rows))), cat=CatMetric())
    with pytest.raises(ValueError, match=r"`self.cat` was called with .* cannot be put together.*num_microbatches=1"):
        run(module, [2, 1])


# ---- nothing is left behind ----


class Untouchable(Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} looked at a value of another stage")


def test_values_of_runs_that_are_not_kept_are_not_looked_at() -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.log("x", rows, batch_size=rows)
        self.log_dict(self.both(rows, rows))
        self.both.update(rows, rows)
        assert self.mean(rows).item() == 0.0
        self.found.append(rows)
        self.last = rows

    module = Module(step, mean=MeanMetric(), both=MetricCollection([MeanSquaredError(), R2Score()]))
    module.found, module.last = [], None
    with StepCapture(module).microbatch(0, 2, keep=False):
        module.step(module, torch.zeros(2).as_subclass(Untouchable))
    assert (module.found, module.last, module.logged, module.mean.update_count) == ([], None, [], 0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("keep", [True, False])
def test_patches_and_changes_end_with_an_exception(error: type[BaseException], keep: bool) -> None:
    def step(self: Module, rows: Tensor) -> None:
        self.mean(rows)
        self.found.append(rows)
        raise error

    module = Module(step, mean=MeanMetric(), pair=MetricCollection([MeanSquaredError()]))
    module.found = []
    before = [dict(vars(m)) for m in module.modules()]
    capture = StepCapture(module)
    with pytest.raises(error), capture.microbatch(0, 2, keep=keep):
        module.step(module, torch.zeros(2))
    assert [list(vars(m)) for m in module.modules()] == [list(attributes) for attributes in before]
    assert all(vars(m)[k] is v for m, old in zip(module.modules(), before, strict=True) for k, v in old.items())
    assert module.found == []
    with capture.microbatch(0, 2):
        pass
    assert capture.results([None]) == StepResults()
    for copied in (copy.deepcopy(module.mean), pickle.loads(pickle.dumps(module.pair))):
        assert not {"forward", "reset"} & set(vars(copied))


class Watching(TorchFunctionMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_modes_see_the_users_operations_and_what_is_needed_at_the_end() -> None:
    def step(self: Module, rows: Tensor) -> Tensor:
        loss = rows.mean()
        self.log("x", loss)
        self.log("y", self.mean(rows))
        return loss.neg()

    module, names = Module(step, mean=MeanMetric()), []
    capture = StepCapture(module)
    rows = torch.ones(2)
    for keep in (True, False):
        with Watching() as mode, capture.microbatch(0, 2, keep=keep):
            capture.finish(module.step(module, rows))
        names.append(mode.names)
    assert names == [["mean", "neg", "_touch"], ["mean", "neg"]]
