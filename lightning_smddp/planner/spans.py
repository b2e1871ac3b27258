"""What ranks did when, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["forward", "backward", "backward_input", "backward_weight", "send", "wait"]

COMPUTE_KINDS: tuple[SpanKind, ...] = ("forward", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Span:
    """One thing that a rank did.

    Attributes:
        rank, stage, microbatch: where and for what.
        kind: a ``send`` runs beside computing; in a ``wait`` the rank does nothing, for lack of the stage's input.
        start_s, end_s: seconds, from an origin common to all ranks.
    """

    rank: int
    stage: int
    kind: SpanKind
    microbatch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


def step_seconds(spans: Sequence[Span]) -> float:
    """From the first start to the last end, over all ranks; 0 without spans."""
    if not spans:
        return 0.0
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def busy_share(spans: Sequence[Span]) -> dict[int, float]:
    """For each rank, the share of the step in which it computes."""
    step = step_seconds(spans)
    busy = dict.fromkeys(ranks_of(spans), 0.0)
    for span in spans:
        if span.kind in COMPUTE_KINDS:
            busy[span.rank] += span.seconds
    if not step:
        return dict.fromkeys(busy, 0.0)
    return {rank: seconds / step for rank, seconds in busy.items()}


def ranks_of(spans: Iterable[Span]) -> list[int]:
    """The ranks that occur, ascending."""
    return sorted({span.rank for span in spans})


def stage_position(spans: Iterable[Span]) -> dict[int, int]:
    """For each stage its position among the stages of its rank: 0 for the rank's first."""
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.rank, set()).add(span.stage)
    positions: dict[int, int] = {}
    for held in stages.values():
        positions.update((stage, position) for position, stage in enumerate(sorted(held)))
    return positions
