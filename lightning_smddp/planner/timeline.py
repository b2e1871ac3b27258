"""What ranks did when: spans of time, as a trace for Perfetto, and as an SVG without any library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

SpanKind = Literal["forward", "backward", "backward_input", "backward_weight", "send", "wait"]

COMPUTE_KINDS: tuple[SpanKind, ...] = ("forward", "backward", "backward_input", "backward_weight")

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
DARK = "#1f2937"
GREY = "#6b7280"
GRID = "#dde1e7"
PAPER = "#ffffff"
BORDER = "#d0d7de"
LIGHTEST = 0.55  # how far the last of a rank's stages is mixed with white

# In the units of the SVG's ``viewBox``. Time runs from LEFT to WIDTH - RIGHT; the first lane begins at TOP.
WIDTH = 1000
LEFT = 76
RIGHT = 24
TOP = 70
LANE = 44  # height of a lane
BOX = 30  # height of its boxes
SEND = 4  # height of the bar for messages under them
FONT = "font-family=\"-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
DIGIT = 0.58  # width of a digit, as a share of the font size
SMALLEST_DIGIT = 7.5  # a smaller number cannot be read, and is left out
LARGEST_DIGIT = 11.5


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
        """From start to end, by the clock: also what the rank waited for within it."""
        return self.end_s - self.start_s


def step_seconds(spans: Sequence[Span]) -> float:
    """From the first start to the last end, over all ranks; 0 without spans."""
    if not spans:
        return 0.0
    last_end = max(span.end_s for span in spans)
    return last_end - _origin(spans)


def busy_share(spans: Sequence[Span]) -> dict[int, float]:
    """For each rank, the share of the step in which it computes."""
    shares = dict.fromkeys(ranks_of(spans), 0.0)
    step = step_seconds(spans)
    if not step:
        return shares
    for span in spans:
        if span.kind in COMPUTE_KINDS:
            shares[span.rank] += span.seconds
    for rank in shares:
        shares[rank] /= step
    return shares


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
        for position, stage in enumerate(sorted(held)):
            positions[stage] = position
    return positions


# ---- a trace for Perfetto ----


def to_perfetto(spans: Sequence[Span], title: str = "pipeline") -> dict[str, Any]:
    """The spans as Chrome trace events: ``json.dump`` it to a file and open that in https://ui.perfetto.dev.

    Each rank is a process, with one row for what it computes and one for what it sends (more where messages
    overlap). Times begin at 0. Format: the "Trace Event Format" of Chrome's trace viewer; times in microseconds.
    """
    origin = _origin(spans)
    events: list[dict[str, Any]] = []
    for rank in ranks_of(spans):
        computed = []
        sent = []
        for span in spans:
            if span.rank != rank:
                continue
            if span.kind == "send":
                sent.append(span)
            else:
                computed.append(span)
        events.append(_metadata("process_name", rank, 0, name=f"rank {rank}"))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        # Slices of one thread must not overlap: the viewer would take one for a call within the other. So each row is a
        # thread by itself.
        rows = _labelled("compute", _rows(computed))
        rows += _labelled("send", _rows(sent))
        for thread, (label, row) in enumerate(rows):
            events.append(_metadata("thread_name", rank, thread, name=label))
            events.append(_metadata("thread_sort_index", rank, thread, sort_index=thread))
            for span in row:
                events.append(_slice(span, thread, origin))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}


def _origin(spans: Sequence[Span]) -> float:
    return min((span.start_s for span in spans), default=0.0)


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans in as few rows as possible, without overlap in any."""
    # Each span goes to the first row that is free when it begins. In the order of their begins that takes no more rows
    # than there are spans at one time.
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for row in rows:
            if row[-1].end_s <= span.start_s:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def _labelled(label: str, rows: list[list[Span]]) -> list[tuple[str, list[Span]]]:
    found = []
    for number, row in enumerate(rows, start=1):
        name = label
        if number > 1:
            name += f" {number}"
        found.append((name, row))
    return found


def _slice(span: Span, thread: int, origin: float) -> dict[str, Any]:
    start = span.start_s - origin
    return {
        "ph": "X",
        "name": f"{span.kind} {span.microbatch}",
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": start * 1e6,
        "dur": span.seconds * 1e6,
        "args": {"stage": span.stage, "microbatch": span.microbatch},
    }


def _metadata(event: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": rank, "tid": thread, "args": args}


# ---- a picture ----


def to_svg(spans: Sequence[Span], title: str = "Pipeline timeline") -> str:
    """One lane for each rank, a box for each micro-batch, lighter for a rank's later stages; messages as thin bars.

    The picture has its own background, so it can be read on light and on dark pages. A box's tooltip says what it is.
    """
    ranks = ranks_of(spans)
    bottom = TOP + LANE * len(ranks)
    height = bottom + 74
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" {FONT}>',
        f"<title>{escape(title)}</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="{BORDER}"/>',
        _text(LEFT, 30, title, size=17, weight=600),
        _text(LEFT, 51, _subtitle(spans), size=12.5, colour=GREY),
    ]
    lines += _axis(step_seconds(spans) * 1e3, bottom)
    top_of: dict[int, int] = {}
    for lane, rank in enumerate(ranks):
        top = TOP + LANE * lane
        top_of[rank] = top
        lines.append(_text(LEFT - 12, top + BOX / 2 + 4, f"rank {rank}", anchor="end"))
    lines += _boxes(spans, top_of)
    lines += _legend(spans, height - 20)
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _text(
    x: float, y: float, text: str, *, size: float = 13, colour: str = DARK, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, tooltip: str = "") -> str:
    radius = min(2.0, height / 10)
    note = ""
    if tooltip:
        note = f"<title>{escape(tooltip)}</title>"
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="{radius:g}" fill="{colour}">'
        f"{note}</rect>"
    )


def _axis(step_ms: float, bottom: float) -> list[str]:
    """A line and a number at each tick; the unit stands at the end of the axis."""
    scale = _width_of_one(step_ms)
    below = bottom + 16
    parts = []
    for tick in ticks_ms(step_ms):
        x = LEFT + tick * scale
        parts.append(f'<path d="M{x:.2f} {TOP - 6}V{bottom}" stroke="{GRID}"/>')
        parts.append(_text(x, below, f"{tick:g}", size=12, colour=GREY, anchor="middle"))
    parts.append(_text(LEFT - 12, below, "ms", size=12, colour=GREY, anchor="end"))
    return parts


def _width_of_one(step: float) -> float:
    """How wide a second is drawn if the step takes ``step`` seconds, or a millisecond if it is in milliseconds."""
    width = WIDTH - LEFT - RIGHT
    if not step:
        return width
    return width / step


def _boxes(spans: Sequence[Span], top_of: dict[int, int]) -> list[str]:
    origin = _origin(spans)
    scale = _width_of_one(step_seconds(spans))
    shade = _shades(spans)
    parts = []
    # Of each rank what it computes comes last, as what is drawn later covers what was drawn before.
    for span in sorted(spans, key=lambda span: (span.rank, _is_computing(span), span.start_s)):
        x = LEFT + (span.start_s - origin) * scale
        width = span.seconds * scale
        top = top_of[span.rank]
        colour = COLOURS[span.kind]
        if _is_computing(span):
            colour = mixed(colour, shade[span.stage])
        if span.kind == "send":
            parts.append(_rect(x, top + BOX + 2, max(width, 1.0), SEND, colour, _tooltip(span)))
            continue
        gap = min(0.6, width / 8)  # keeps neighbours apart
        seen = max(width - 2 * gap, 0.4)  # however short it is, it can be pointed at
        parts.append(_rect(x + gap, top, seen, BOX, colour, _tooltip(span)))
        if _is_computing(span):
            middle = x + width / 2
            base = top + BOX / 2 + 4
            parts += _number(span.microbatch, middle, base, width, colour)
    return parts


def _tooltip(span: Span) -> str:
    milliseconds = span.seconds * 1e3
    return f"{LEGEND[span.kind]}, micro-batch {span.microbatch}, stage {span.stage}: {milliseconds:.4g} ms"


def _number(number: int, middle: float, base: float, width: float, colour: str) -> list[str]:
    """A micro-batch's number in the middle of its box, as large as it fits; nothing where it could not be read."""
    label = str(number)
    size = min(LARGEST_DIGIT, (width - 2) / (DIGIT * len(label)))
    if size < SMALLEST_DIGIT:
        return []
    return [_text(middle, base, label, size=round(size, 1), colour=text_on(colour), anchor="middle")]


def _legend(spans: Sequence[Span], y: float) -> list[str]:
    entries = [(COLOURS[kind], LEGEND[kind]) for kind in _kinds_of(spans)]
    lightest = max(_shades(spans).values(), default=0.0)
    if lightest:
        entries.append((mixed(COLOURS["forward"], lightest), "lighter: later stage of the rank"))
    parts = []
    x = float(LEFT)
    for colour, label in entries:
        parts.append(_rect(x, y - 11, 14, 14, colour))
        parts.append(_text(x + 20, y, label, size=12.5))
        x += 44 + 6.6 * len(label)
    return parts


def _kinds_of(spans: Sequence[Span]) -> list[SpanKind]:
    """The kinds that occur, in the legend's order."""
    present = {span.kind for span in spans}
    return [kind for kind in LEGEND if kind in present]


def _shades(spans: Sequence[Span]) -> dict[int, float]:
    """For each stage how far its colour is mixed with white: the further on in its rank, the lighter."""
    positions = stage_position(spans)
    last = max(positions.values(), default=0)
    shades = dict.fromkeys(positions, 0.0)
    if last > 0:
        for stage, position in positions.items():
            shades[stage] = LIGHTEST * position / last
    return shades


def mixed(colour: str, white: float) -> str:
    """``colour`` mixed with so much white."""
    text = "#"
    for part in _parts(colour):
        lighter = round(part + (255 - part) * white)
        text += f"{lighter:02x}"
    return text


def _parts(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of ``"#rrggbb"``, 0 to 255."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def text_on(colour: str) -> str:
    """White or dark, whichever is easier to read on ``colour`` (relative luminance as in WCAG 2)."""
    red, green, blue = [_linear(part / 255) for part in _parts(colour)]
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    if luminance > 0.36:
        return DARK
    return "#ffffff"


def _linear(part: float) -> float:
    """Of an sRGB value, 0 to 1."""
    if part <= 0.04045:
        return part / 12.92
    return float(((part + 0.055) / 1.055) ** 2.4)


def _is_computing(span: Span) -> bool:
    """Whether the span is a box with a micro-batch number."""
    return span.kind in COMPUTE_KINDS


def ticks_ms(step_ms: float, most: int = 8) -> list[float]:
    """Round positions of a time axis from 0 to ``step_ms``, in milliseconds: 1, 2 or 5 times a power of ten apart."""
    if step_ms <= 0:
        return [0.0]
    # It is the largest power of ten that is at most `step_ms / most`. So ten times it is wide enough; twenty times
    # stands here for the last bits of the logarithm.
    power = 10.0 ** math.floor(math.log10(step_ms / most))
    spacing = power
    for factor in (1, 2, 5, 10, 20):
        spacing = power * factor
        if step_ms / spacing <= most:
            break
    count = math.floor(step_ms / spacing + 1e-9) + 1
    return [index * spacing for index in range(count)]


def _subtitle(spans: Sequence[Span]) -> str:
    """The step in figures."""
    shares = busy_share(spans)
    mean = sum(shares.values()) / max(1, len(shares))
    milliseconds = step_seconds(spans) * 1e3
    return f"step {milliseconds:.4g} ms, ranks compute {mean:.0%} of it"
