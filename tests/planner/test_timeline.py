"""The pictures: every span is in them, and they are well-formed."""

from __future__ import annotations

import json
from collections import Counter
from xml.etree import ElementTree

import pytest

from lightning_smddp.planner.timeline import COLOURS, Span, mixed, text_on, ticks_ms, to_perfetto, to_svg

SVG = "{http://www.w3.org/2000/svg}"


def one_after_another(ranks: int, count: int) -> list[Span]:
    """Micro-batches through stages in turn: a forward takes 1 ms, a backward 2 ms, a message 0.2 ms."""
    spans: list[Span] = []
    free, now = [0.0] * ranks, 0.0
    for microbatch in range(count):
        there_and_back = [(rank, 1e-3) for rank in range(ranks)] + [(rank, 2e-3) for rank in reversed(range(ranks))]
        for index, (rank, seconds) in enumerate(there_and_back):
            end = now + seconds
            if now > free[rank]:
                spans.append(Span(rank, rank, "wait", microbatch, free[rank], now))
            spans.append(Span(rank, rank, "forward" if index < ranks else "backward", microbatch, now, end))
            if index not in (ranks - 1, 2 * ranks - 1):
                spans.append(Span(rank, rank, "send", microbatch, end, end + 2e-4))
                end += 2e-4
            free[rank], now = now + seconds, end
    return spans


SPANS = one_after_another(3, 12)
TWO_STAGES = [
    Span(0, 0, "forward", 0, 0, 1),
    Span(0, 1, "forward", 0, 1, 2),
    Span(0, 1, "backward_input", 0, 2, 3),
    Span(0, 1, "backward_weight", 0, 3, 4),
    Span(0, 0, "backward", 0, 4, 6),
]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def tooltips(svg: str) -> list[str]:
    return [element.findtext(f"{SVG}title") or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}rect")]


def test_perfetto_has_every_span() -> None:
    shifted = [Span(s.rank, s.stage, s.kind, s.microbatch, s.start_s + 50, s.end_s + 50) for s in SPANS]
    trace = json.loads(json.dumps(to_perfetto(shifted)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert Counter(event["cat"] for event in slices) == Counter(span.kind for span in SPANS)
    first = next(event for event in slices if event["pid"] == 1 and event["cat"] == "forward")
    assert first["name"] == "forward 0"
    assert first["args"] == {"stage": 1, "microbatch": 0}
    assert (first["ts"], first["dur"]) == pytest.approx((1200, 1000))
    assert min(event["ts"] for event in slices) == 0


def test_perfetto_names_its_rows() -> None:
    events = to_perfetto(SPANS)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 0] == "compute"
    assert names[1, 1] == "send"
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1", "rank 2"]


def test_no_two_slices_of_a_perfetto_row_overlap() -> None:
    overlapping = [Span(0, 0, "send", index, index, index + 2.5) for index in range(6)]
    events = [e for e in to_perfetto([*SPANS, *overlapping])["traceEvents"] if e["ph"] == "X"]
    for row in {(e["pid"], e["tid"]) for e in events}:
        slices = sorted((e["ts"], e["dur"]) for e in events if (e["pid"], e["tid"]) == row)
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in zip(slices, slices[1:], strict=False))
    assert len({e["tid"] for e in events if e["pid"] == 0}) == 4  # computing, and three rows of messages


def test_svg_has_every_span_and_its_legend() -> None:
    svg = to_svg(SPANS, "GPT <2> & more")
    assert sum(", micro-batch " in tip for tip in tooltips(svg)) == len(SPANS)
    assert "forward, micro-batch 0, stage 1: 1 ms" in tooltips(svg)
    shown = texts(svg)
    assert {"GPT <2> & more", "rank 0", "rank 2", "ms", "0", "forward", "backward", "send", "wait"} <= set(shown)
    assert not any("later stage" in text for text in shown)
    assert any(text.startswith("step ") and text.endswith("of it") for text in shown)


def test_svg_shades_later_stages_of_a_rank() -> None:
    svg = to_svg(TWO_STAGES)
    fills = {
        element.findtext(f"{SVG}title"): element.get("fill")
        for element in ElementTree.fromstring(svg).iter(f"{SVG}rect")
    }
    assert fills["forward, micro-batch 0, stage 0: 1000 ms"] == COLOURS["forward"]
    assert fills["forward, micro-batch 0, stage 1: 1000 ms"] == mixed(COLOURS["forward"], 0.55)
    assert "lighter: later stage of the rank" in texts(svg)
    assert {"backward: input gradient", "backward: weight gradient"} <= set(texts(svg))


def test_svg_stays_inside_its_frame() -> None:
    for element in ElementTree.fromstring(to_svg(SPANS)).iter(f"{SVG}rect"):
        right = float(element.get("x", 0)) + float(element.get("width", 0))
        assert 0 <= float(element.get("x", 0)) < right <= 1000


def test_numbers_are_left_out_where_they_do_not_fit() -> None:
    many = one_after_another(1, 500)
    assert "499" not in texts(to_svg(many))
    assert "11" in texts(to_svg(SPANS))


@pytest.mark.parametrize("spans", [[], [Span(0, 0, "forward", 0, 1.0, 1.0)]])
def test_nothing_to_draw(spans: list[Span]) -> None:
    ElementTree.fromstring(to_svg(spans))
    assert [e for e in to_perfetto(spans)["traceEvents"] if e["ph"] == "X"] == [] or spans


@pytest.mark.parametrize(
    ("step_ms", "last", "count"),
    [(0, 0, 1), (7, 7, 8), (8, 8, 9), (9, 8, 5), (74.1, 70, 8), (0.03, 0.03, 7), (1000, 1000, 6)],
)
def test_ticks_are_round_and_few(step_ms: float, last: float, count: int) -> None:
    ticks = ticks_ms(step_ms)
    assert (ticks[0], ticks[-1], len(ticks)) == (0, pytest.approx(last), count)


def test_numbers_can_be_read_on_every_colour() -> None:
    assert text_on("#ffffff") == "#1f2937"
    assert text_on("#000000") == "#ffffff"
    assert text_on(mixed(COLOURS["forward"], 0.55)) == "#1f2937"
    assert text_on(COLOURS["forward"]) == "#ffffff"
