"""Two runs of a module, step by step: outputs, logged values, weights and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_VALUES, _UPDATES = 1e-4, 5e-3  # relative differences that rounding explains


@dataclass(frozen=True)
class Difference:
    """One comparison.

    Attributes:
        name: of what.
        expected, actual: numbers, in one process and in the pipeline: values, or norms of tensors.
        relative: the difference.
        tolerance: that rounding explains.
        group: of the tensors that one step updated.
    """

    name: str
    expected: float
    actual: float
    relative: float
    tolerance: float
    group: str = ""

    @property
    def tensor(self) -> str:
        """Its name within the group."""
        return self.name.removeprefix(f"{self.group} of ")

    @property
    def matters(self) -> bool:
        """Whether it is more than rounding explains; NaN, which compares as False, matters."""
        return not self.relative <= self.tolerance

    def text(self) -> str:
        """Both values and their relative difference, in a line."""
        return f"one process {self.expected:.7g}, pipeline {self.actual:.7g}, difference {self.relative:.1e}"


def compare_runs(alone: Mapping[str, Any], piped: Mapping[str, Any]) -> list[Difference]:
    """Losses and outputs of each training step, what it logged, how far it moved weights and buffers; validation."""
    found = []
    if len(alone["training"]) != len(piped["training"]):
        count, other = float(len(alone["training"])), float(len(piped["training"]))
        found.append(Difference("the number of training steps", count, other, 1.0, 0.0))
    before, other_before = alone["initial"], alone["initial"]
    for number, (one, other_step) in enumerate(zip(alone["training"], piped["training"], strict=False), start=1):
        found += _values(f"step {number}, output", one["outputs"], other_step["outputs"])
        found += _values(f"step {number}, logged", one["logged"], other_step["logged"])
        found += _moved(f"step {number}", (before, one["state"]), (other_before, other_step["state"]))
        before, other_before = one["state"], other_step["state"]
    for number, (first, second) in enumerate(zip(alone["validation"], piped["validation"], strict=False), start=1):
        found += _values(f"validation step {number}, output", first, second)
    return found + _values("after validation, logged", alone["logged"], piped["logged"])


def _values(where: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[Difference]:
    found = []
    for name in dict.fromkeys([*one, *other]):
        label = f"{where} {name!r}" if name else where
        if name not in one or name not in other or one[name].shape != other[name].shape:
            found.append(Difference(label, _norm(one.get(name)), _norm(other.get(name)), float("inf"), _VALUES))
        else:
            found.append(_difference(label, one[name], other[name], float(one[name].double().norm()), _VALUES))
    return found


def _moved(where: str, one: tuple[Any, Any], other: tuple[Any, Any]) -> list[Difference]:
    """Each tensor of the state that a step changed: the difference, in terms of the change."""
    found = []
    for name, value in one[1].items():
        if name not in other[1] or name not in one[0] or not value.is_floating_point():
            continue
        change = float((value.double() - one[0][name].double()).norm())
        other_change = float((other[1][name].double() - other[0][name].double()).norm())
        if change or other_change:
            # In terms of the step, not of the weight: an update that is wrong altogether is a small part of a weight.
            apart = float((value.double() - other[1][name].double()).norm())
            floor = 1e-6 * float(value.double().norm())  # the change may be within rounding of the value itself
            relative = apart / max(change, floor, 1e-30)
            group = f"{where}, update"
            found.append(Difference(f"{group} of {name}", change, other_change, relative, _UPDATES, group))
    return found


def _difference(label: str, one: Tensor, other: Tensor, scale: float, tolerance: float) -> Difference:
    apart = float((one.double() - other.double()).norm())
    relative = apart / max(scale, 1e-8)
    shown = [float(value) if value.numel() == 1 else _norm(value) for value in (one, other)]
    return Difference(label, shown[0], shown[1], relative, tolerance)


def _norm(value: Tensor | None) -> float:
    return float("nan") if value is None else float(value.double().norm())
