"""What a step does to attributes, with other stages of the rank, and runs for nothing, in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_smddp.bridge.attribute_scopes import AttributeScopes


class Meter:
    """A helper object."""

    def __init__(self) -> None:
        self.is_ready = False
        self.log: list[int] = []  # of this name, a LightningModule's is not the user's


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.opened = nn.Sequential()
        self.meter = Meter()
        self.calls = 0
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


def test_each_stage_goes_on_from_its_own() -> None:
    """What there is in the objects of users is compared in ``test_contract.py``; a helper's ``log`` is its own."""

    def step(module: Module, index: int) -> None:
        module.calls += 1
        module.meter.log.append(index)

    module = ran(step, stages=3, batches=2)
    assert module.calls == 6
    assert module.meter.log == [0, 1, 2, 0, 1, 2]


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
