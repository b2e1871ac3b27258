"""What a pipeline schedule tells each rank to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One micro-batch through one stage.

    Attributes:
        stage: index of the stage.
        kind: F forward, B whole backward, or its two halves: I gradient of the input, W gradient of the weights.
        microbatch: index of the micro-batch.
    """

    stage: int
    kind: Kind
    microbatch: int


Orders = Mapping[int, Sequence[Action]]  # rank -> what it does, in order


def parse_action(text: str) -> Action:
    """The action that torch spells as ``text``: "2F0" is stage 2, forward, micro-batch 0.

    Raises:
        ValueError: for anything else than a forward or backward of one micro-batch.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no action: expected stage, F, B, I or W, micro-batch, like '2F0'")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]  # the pattern allows a Kind only
