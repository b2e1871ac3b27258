"""What a step does to attributes, with other stages of the rank, and runs for nothing, in between."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smddp.bridge.attribute_scopes import AttributeScopes


class Meter:
    """A helper object."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.is_ready = False
        self.log: list[int] = []  # of this name, a LightningModule's is not the user's


class Frozen(dict[str, int]):
    """As configurations of diffusers are."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a frozen dict")


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen(width=1)
        self.inner = nn.Linear(1, 1)
        self.opened = nn.Sequential()
        self.meter = Meter()
        self.meters: dict[str, Meter] = {}
        self.calls = 0
        self.rows: list[Any] = []
        self.long = list(range(2000))
        self.by_name: dict[str, Any] = defaultdict(list)
        self.recent: deque[Any] = deque(maxlen=2)
        self.seen: set[int] = set()
        self.hits = torch.zeros(())


Step = Callable[[Module, int], None]


def scopes_of(module: Module, step: Step) -> AttributeScopes:
    """Behind a trace."""
    scopes = AttributeScopes(module, frozenset({*vars(nn.Module()), "log"}))
    with scopes.within(None, 2), scopes.learning():
        step(module, 2)
    scopes.learn({"inner": True})
    scopes.drop()
    return scopes


def ran(step: Step, stages: int = 2, batches: int = 1) -> Module:
    """A module behind batches of three micro-batches, with a trace, dry runs, and all stages on one rank."""
    module = Module()
    scopes = scopes_of(module, step)
    for _ in range(batches):
        for index in range(3):
            with scopes.within(None, index):
                step(module, index)
        for index in range(3):
            for stage in range(stages):
                with scopes.within(stage, index):
                    step(module, index)
        scopes.end(scopes.changes())
    return module


def everything(module: Module, index: int) -> None:
    module.calls += 1
    module.rows.append(index)
    module.long.append(index)
    module.by_name["loss"].append(index)
    module.by_name["last"] = index
    module.recent.append(index)
    module.seen.add(index)
    module.hits += 1
    module.meter.sum += index
    module.meter.log.append(index)


@pytest.mark.parametrize("stages", [1, 3])
def test_each_stage_goes_on_from_its_own(stages: int) -> None:
    module = ran(everything, stages, batches=2)
    assert module.calls == 6
    assert module.rows == [0, 1, 2, 0, 1, 2]
    assert module.long == [*range(2000), 0, 1, 2, 0, 1, 2]
    assert module.by_name == {"loss": [0, 1, 2, 0, 1, 2], "last": 2}
    assert type(module.by_name) is defaultdict
    assert list(module.recent) == [1, 2]
    assert module.seen == {0, 1, 2}
    assert module.hits == 6
    assert module.meter.sum == 6.0
    assert module.meter.log == module.rows


def test_dry_runs_go_on_from_the_micro_batch_before() -> None:
    found = []

    def step(module: Module, index: int) -> None:
        found.append(module.calls)
        module.calls += 1

    ran(step, stages=1)
    assert found == [0, 0, 1, 2, 0, 1, 2]  # a trace, three dry runs, three runs


def test_a_flag_of_another_object_is_not_taken_back() -> None:
    """As transformers set one, once, where they install hooks."""

    def step(module: Module, _: int) -> None:
        if not getattr(module.opened, "has_hooks", False):
            module.opened.register_forward_hook(lambda *_: None)
            module.opened.has_hooks = True
        module.meter.is_ready = True

    module = ran(step, stages=3, batches=2)
    assert len(module.opened._forward_hooks) == 1
    assert module.meter.is_ready


def test_numbers_of_modules_placed_whole_are_named_once() -> None:
    def step(module: Module, _: int) -> None:
        module.inner.calls = getattr(module.inner, "calls", 0) + 1
        module.opened.calls = getattr(module.opened, "calls", 0) + 1

    with pytest.warns(UserWarning, match=r"`self\.inner\.calls`: changed inside of modules") as warned:
        module = ran(step)
    assert len(warned) == 1
    assert module.opened.calls == 3
    assert module.inner.calls > 3  # by dry runs and all stages of this rank


def test_another_name_for_a_tensor_that_is_written_in_place() -> None:
    def step(module: Module, index: int) -> None:
        module.last = module.hits
        module.hits += 1

    module = ran(step, batches=2)
    assert (float(module.hits), float(module.last)) == (6.0, 6.0)
