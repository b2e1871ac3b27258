"""What a batch's step leaves in the module's attributes, for trials of the step on the next batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_smddp.bridge.step_attributes import Place
from lightning_smddp.bridge.step_results import StepResults


@dataclass(frozen=True)
class KeptState:
    """Items that lists have gained, and values that attributes were set to."""

    appended: list[tuple[Place, list[Any]]]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, results: StepResults) -> KeptState | None:
        """None if there is nothing."""
        if not results.appended and not results.attributes:
            return None
        return cls(results.appended, results.attributes)

    def moved(self, module: nn.Module) -> KeptState:
        """The same with other numbers, also for what is still zero: so are counts of hits, for the few rows of a trial.

        Where the step counts nothing, that makes no difference.
        """
        numbers = {name: value for name, value in vars(module).items() if _is_zero(value)}
        return KeptState(self.appended, {name: _moved(value) for name, value in {**numbers, **self.attributes}.items()})

    def put(self, module: nn.Module) -> None:
        """Set the module's attributes so, within ``preserve_state``: members of its lists and dicts are not written."""
        own = vars(module)
        own.update(self.attributes)
        for place, tail in self.appended:
            container = own
            if len(place) > 1:
                container = own[place[0]] = own[place[0]].copy()
            before = container[place[-1]] if isinstance(container, list) else container.get(place[-1], [])
            container[place[-1]] = [*before, *tail]


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


def _moved(value: Any) -> Any:
    is_number = type(value) in (int, float) or (isinstance(value, Tensor) and value.dim() == 0)
    return value + 1 if is_number else value
