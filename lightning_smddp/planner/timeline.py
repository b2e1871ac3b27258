"""A step as a trace for Perfetto, from measured spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_smddp.planner.spans import Span, ranks_of


def to_perfetto(spans: Sequence[Span], title: str = "pipeline") -> dict[str, Any]:
    """The spans as Chrome trace events: ``json.dump`` it to a file and open that in https://ui.perfetto.dev.

    Each rank is a process, with one row for what it computes and one for what it sends (more where messages
    overlap). Times begin at 0. Format: the "Trace Event Format" of Chrome's trace viewer; times in microseconds.
    """
    origin = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks_of(spans):
        of_rank = [span for span in spans if span.rank == rank]
        computing = _rows([span for span in of_rank if span.kind != "send"])
        sending = _rows([span for span in of_rank if span.kind == "send"])
        events += [_named("process_name", rank, 0, f"rank {rank}"), _sorted_as("process_sort_index", rank, 0, rank)]
        for thread, (label, row) in enumerate([*_labelled("compute", computing), *_labelled("send", sending)]):
            events += [
                _named("thread_name", rank, thread, label),
                _sorted_as("thread_sort_index", rank, thread, thread),
            ]
            events += [_slice(span, thread, origin) for span in row]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans in as few rows as possible, without overlap in any."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        row = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if row is None:
            row = []
            rows.append(row)
        row.append(span)
    return rows


def _labelled(label: str, rows: list[list[Span]]) -> list[tuple[str, list[Span]]]:
    labels = [label, *(f"{label} {number}" for number in range(2, len(rows) + 1))]
    return list(zip(labels, rows, strict=False))


def _slice(span: Span, thread: int, origin: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.kind} {span.microbatch}",
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": (span.start_s - origin) * 1e6,
        "dur": span.seconds * 1e6,
        "args": {"stage": span.stage, "microbatch": span.microbatch},
    }


def _named(event: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": rank, "tid": thread, "args": {"name": name}}


def _sorted_as(event: str, rank: int, thread: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": rank, "tid": thread, "args": {"sort_index": index}}
