"""What ranks did when: spans of time, as a trace for Perfetto and as a picture by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SpanKind = Literal["forward", "backward", "backward_input", "backward_weight", "send", "wait"]

COLOURS: dict[SpanKind, str] = {  # told apart with any colour vision
    "forward": "#2f6db5",
    "backward": "#d9822b",
    "backward_input": "#b8433a",
    "backward_weight": "#7b4fa3",
    "send": "#4d5866",
    "wait": "#eceff3",
}
_SIZE = (10.0, 0.6)  # inches: the width, and the height of a rank
_HEIGHT = 1.4  # inches, of title, axis and legend
_DIGITS = 0.02  # width of two digits, as a share of the picture's


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

    @property
    def computes(self) -> bool:
        """Whether it is no message and no waiting."""
        return self.kind not in ("send", "wait")


def to_perfetto(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as Chrome trace events: ``json.dump`` it to a file and open that in https://ui.perfetto.dev.

    Each rank is a process, with a row for what it computes and one for what it sends. Times begin at 0, in
    microseconds. Format: the "Trace Event Format" of Chrome's trace viewer.
    """
    origin = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for row, name in enumerate(("compute", "send")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": f"{span.kind} {span.microbatch}",
                "cat": span.kind,
                "pid": span.rank,
                "tid": int(span.kind == "send"),
                "ts": (span.start_s - origin) * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"stage": span.stage, "microbatch": span.microbatch},
            }
        )
    return {"traceEvents": events}


def draw(spans: Sequence[Span], title: str, path: Path) -> None:
    """One lane for each rank, a box for each micro-batch, lighter for a rank's later stages. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    origin = min(span.start_s for span in spans)
    step = max(span.end_s for span in spans) - origin
    ranks = sorted({span.rank for span in spans})
    computing = sum(span.seconds for span in spans if span.computes) / (len(ranks) * step)
    width, height = _SIZE
    figure = Figure(figsize=(width, _HEIGHT + height * len(ranks)), layout="constrained")
    axes = figure.add_subplot(title=f"{title}: step {1e3 * step:.4g} ms, ranks compute {computing:.0%} of it")
    for lane, rank in enumerate(ranks):
        own = [span for span in spans if span.rank == rank]
        stages = sorted({span.stage for span in own})
        boxes = [(1e3 * (span.start_s - origin), 1e3 * span.seconds) for span in own]
        colours = [(COLOURS[span.kind], 1 - 0.5 * stages.index(span.stage) / len(stages)) for span in own]
        axes.broken_barh(boxes, (lane - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.5)
        for span, (start, length) in zip(own, boxes, strict=True):
            if span.computes and span.seconds > _DIGITS * step:
                axes.text(
                    start + length / 2, lane, str(span.microbatch), color="white", size=8, ha="center", va="center"
                )
    axes.set(xlabel="ms", yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, 1e3 * step)
    axes.invert_yaxis()
    drawn = [kind for kind in COLOURS if any(span.kind == kind for span in spans)]
    patches = [Patch(color=COLOURS[kind], label=kind.replace("_", ": ")) for kind in drawn]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path)
