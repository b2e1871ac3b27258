"""What the timeline's SVG and PNG have in common: colours, labels, ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_smddp.planner.spans import COMPUTE_KINDS, Span, SpanKind, busy_share, stage_position, step_seconds

COLOURS: dict[SpanKind, str] = {  # told apart with any colour vision
    "forward": "#2f6db5",
    "backward": "#d9822b",
    "backward_input": "#b8433a",
    "backward_weight": "#7b4fa3",
    "send": "#4d5866",
    "wait": "#eceff3",
}
LEGEND: dict[SpanKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward: input gradient",
    "backward_weight": "backward: weight gradient",
    "send": "send",
    "wait": "wait",
}
DARK, GREY, GRID, PAPER, BORDER = "#1f2937", "#6b7280", "#dde1e7", "#ffffff", "#d0d7de"
LIGHTEST = 0.55  # how far the last of a rank's stages is mixed with white


def kinds_of(spans: Sequence[Span]) -> list[SpanKind]:
    """The kinds that occur, in the legend's order."""
    present = {span.kind for span in spans}
    return [kind for kind in LEGEND if kind in present]


def shades(spans: Sequence[Span]) -> dict[int, float]:
    """For each stage how far its colour is mixed with white: the further on in its rank, the lighter."""
    place = stage_position(spans)
    most = max(place.values(), default=0)
    return {stage: LIGHTEST * index / most if most else 0.0 for stage, index in place.items()}


def mixed(colour: str, white: float) -> str:
    """``colour`` mixed with so much white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def text_on(colour: str) -> str:
    """White or dark, whichever is easier to read on ``colour`` (relative luminance as in WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.36 else "#ffffff"


def is_computing(span: Span) -> bool:
    """Whether the span is a box with a micro-batch number."""
    return span.kind in COMPUTE_KINDS


def ticks_ms(step_ms: float, most: int = 8) -> list[float]:
    """Round positions of a time axis from 0 to ``step_ms``, in milliseconds: 1, 2 or 5 times a power of ten apart."""
    if step_ms <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(step_ms / most))
    spacing = next(power * factor for factor in (1, 2, 5, 10, 20) if step_ms / (power * factor) <= most)
    return [index * spacing for index in range(math.floor(step_ms / spacing + 1e-9) + 1)]


def subtitle(spans: Sequence[Span]) -> str:
    """The step in figures."""
    shares = busy_share(spans)
    mean = sum(shares.values()) / len(shares) if shares else 0.0
    return f"step {step_seconds(spans) * 1e3:.4g} ms, ranks compute {mean:.0%} of it"
