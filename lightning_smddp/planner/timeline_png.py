"""The same picture as the SVG, as a PNG; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_smddp.planner.spans import Span, ranks_of, step_seconds
from lightning_smddp.planner.timeline_style import (
    COLOURS,
    DARK,
    GREY,
    GRID,
    LEGEND,
    is_computing,
    kinds_of,
    mixed,
    shades,
    subtitle,
    text_on,
    ticks_ms,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, LANE_IN, DPI = 10.0, 0.44, 150
BOX, SEND = 0.68, 0.1  # heights, in lanes
LEFT, SHARE = 0.076, 0.9  # where the axis begins and how wide it is, in shares of the width
AXIS_PT = SHARE * WIDTH_IN * 72
DIGIT = 0.64  # width of a digit, as a share of the font size


def to_png(spans: Sequence[Span], path: str | Path, title: str = "Pipeline timeline") -> None:
    """Draw the spans to ``path``, as ``to_svg`` does.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        message = 'to_png needs matplotlib: pip install "lightning-smddp[plot]", or use to_svg, which needs nothing'
        raise ModuleNotFoundError(message) from error
    ranks = ranks_of(spans)
    height = 1.5 + LANE_IN * len(ranks)
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor="white")
    axes = figure.add_axes((LEFT, 0.75 / height, SHARE, LANE_IN * len(ranks) / height))
    _boxes(axes, spans)
    _frame(axes, spans, ranks)
    figure.text(LEFT, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", color=DARK)
    figure.text(LEFT, 1 - 0.52 / height, subtitle(spans), fontsize=9, color=GREY)
    _legend(axes, spans)
    figure.savefig(path)


def _boxes(axes: Axes, spans: Sequence[Span]) -> None:
    origin, step_ms = min((span.start_s for span in spans), default=0.0), step_seconds(spans) * 1e3
    lane = {rank: index for index, rank in enumerate(ranks_of(spans))}
    shade = shades(spans)
    for span in sorted(spans, key=is_computing):
        x, width, top = (span.start_s - origin) * 1e3, span.seconds * 1e3, lane[span.rank]
        if span.kind == "send":
            axes.barh(top + BOX + 0.05, width, SEND, x, align="edge", color=COLOURS["send"], linewidth=0)
            continue
        colour = mixed(COLOURS[span.kind], shade[span.stage] if is_computing(span) else 0.0)
        axes.barh(top, width, BOX, x, align="edge", color=colour, edgecolor="white", linewidth=0.6, zorder=2)
        label = str(span.microbatch)
        size = min(7.5, (width / step_ms * AXIS_PT - 1) / (DIGIT * len(label))) if step_ms else 0.0
        if is_computing(span) and size >= 5:
            middle = x + width / 2, top + BOX / 2
            axes.text(*middle, label, ha="center", va="center_baseline", fontsize=size, color=text_on(colour))


def _frame(axes: Axes, spans: Sequence[Span], ranks: Sequence[int]) -> None:
    step_ms = step_seconds(spans) * 1e3
    axes.set_xlim(0, step_ms or 1.0)
    axes.set_ylim(max(len(ranks), 1), -0.1)
    ticks = ticks_ms(step_ms)
    axes.set_xticks(ticks, [f"{tick:g} ms" for tick in ticks], fontsize=8.5, color=GREY)
    axes.set_yticks([lane + BOX / 2 for lane in range(len(ranks))], [f"rank {rank}" for rank in ranks], color=DARK)
    axes.tick_params(length=0, labelsize=9)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(axes: Axes, spans: Sequence[Span]) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(color=COLOURS[kind], label=LEGEND[kind]) for kind in kinds_of(spans)]
    lightest = max(shades(spans).values(), default=0.0)
    if lightest:
        entries.append(Patch(color=mixed(COLOURS["forward"], lightest), label="lighter: later stage of the rank"))
    axes.figure.legend(
        handles=entries,
        loc="lower left",
        bbox_to_anchor=(LEFT - 0.01, 0.0),
        ncols=len(entries) or 1,
        frameon=False,
        fontsize=8.5,
    )
