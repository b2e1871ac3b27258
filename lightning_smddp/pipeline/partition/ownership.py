"""Which ranks of a pipeline hold which parameters: plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Ownership:
    """The ranks of a pipeline (0 to p-1) that hold each parameter, and the one that speaks for each buffer.

    A parameter is known by its first name in ``named_parameters()``, however many names it has.

    Attributes:
        parameters: name -> the ranks that hold it. The first is its owner: it writes checkpoints, and counts it in
            the norm of the gradients.
        buffers: name -> owner, of each buffer that training changes. Every rank holds every buffer.
        num_ranks: p.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, int]
    num_ranks: int

    def __post_init__(self) -> None:
        everyone = range(self.num_ranks)
        for name, ranks in self.parameters.items():
            assert ranks, f"no rank holds {name}"
            assert len(set(ranks)) == len(ranks), f"{name}: {ranks}"
            assert all(rank in everyone for rank in ranks), f"{name}: {ranks}"
        assert all(rank in everyone for rank in self.buffers.values()), self.buffers

    def is_mine(self, name: str, rank: int) -> bool:
        """Whether ``rank`` holds parameter ``name``."""
        return rank in self.parameters[name]

    def owner(self, name: str) -> int:
        """The rank that speaks for a parameter or buffer."""
        if name in self.parameters:
            return self.parameters[name][0]
        return self.buffers[name]

    def held_by(self, rank: int) -> list[str]:
        """Names of the parameters that ``rank`` holds, in the module's order."""
        return [name for name, ranks in self.parameters.items() if rank in ranks]

    def shared(self) -> dict[tuple[int, ...], list[str]]:
        """For each set of two or more ranks (ascending) the parameters that exactly these ranks hold, sorted."""
        sets: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in self.parameters.items():
            if len(ranks) > 1:
                sets.setdefault(tuple(sorted(ranks)), []).append(name)
        return dict(sorted(sets.items()))

    def check(self, module: nn.Module) -> None:
        """Raise ``ValueError`` if ``module``'s parameters are not the ones that were placed."""
        names = {name for name, _ in module.named_parameters()}
        new, lost = sorted(names - set(self.parameters)), sorted(set(self.parameters) - names)
        if new or lost:
            raise ValueError(
                f"{type(module).__name__}'s parameters changed after it was divided among {self.num_ranks} ranks: "
                f"{new or 'none'} came, {lost or 'none'} went. Create all layers in `__init__` or `configure_model`."
            )


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, by their first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def held_parameters(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, nn.Parameter]:
    """The parameters that ``rank`` holds, by name, in the module's order."""
    return {name: p for name, p in module.named_parameters() if ownership.is_mine(name, rank)}
