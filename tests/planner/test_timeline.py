"""Timelines: every span is in the trace. `tests/strategies/test_pipeline_check.py` has pictures of a real step."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from lightning_smddp.planner.timeline import Span, to_perfetto

SPANS = [
    Span(0, 0, "forward", 0, 0.0, 1e-3),
    Span(0, 0, "send", 0, 1e-3, 1.2e-3),
    Span(1, 1, "wait", 0, 0.0, 1.2e-3),
    Span(1, 1, "forward", 0, 1.2e-3, 2.2e-3),
    Span(1, 1, "backward", 0, 2.2e-3, 4.2e-3),
    Span(1, 1, "send", 0, 4.2e-3, 4.4e-3),
    Span(0, 0, "wait", 0, 1e-3, 4.4e-3),
    Span(0, 0, "backward", 0, 4.4e-3, 6.4e-3),
]


def test_perfetto_has_every_span() -> None:
    shifted = [Span(s.rank, s.stage, s.kind, s.microbatch, s.start_s + 50, s.end_s + 50) for s in SPANS]
    events = json.loads(json.dumps(to_perfetto(shifted)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert Counter(event["cat"] for event in slices) == Counter(span.kind for span in SPANS)
    first = next(event for event in slices if event["pid"] == 1 and event["cat"] == "forward")
    assert first["name"] == "forward 0"
    assert first["args"] == {"stage": 1, "microbatch": 0}
    assert (first["ts"], first["dur"]) == pytest.approx((1200, 1000))
    assert min(event["ts"] for event in slices) == 0
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert (names[0, 0], names[1, 1]) == ("compute", "send")
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    assert to_perfetto([])["traceEvents"] == []
