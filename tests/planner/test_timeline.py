"""The pictures: every span is in them, and they are well-formed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_smddp.planner.actions import Action
from lightning_smddp.planner.schedules import one_f_one_b_order
from lightning_smddp.planner.simulate import simulate
from lightning_smddp.planner.spans import Span
from lightning_smddp.planner.timeline import to_perfetto, to_png, to_svg
from lightning_smddp.planner.timeline_style import COLOURS, mixed, text_on, ticks_ms

SVG = "{http://www.w3.org/2000/svg}"
SPANS = simulate(one_f_one_b_order(3, 12), [1e-3] * 3, [2e-3] * 3, [2e-4] * 2).spans
TWO_STAGES = simulate(
    {0: [Action(0, "F", 0), Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0), Action(0, "B", 0)]}, [1, 1], [2, 2]
).spans


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
    many = simulate(one_f_one_b_order(1, 500), [1e-3], [2e-3]).spans
    assert "499" not in texts(to_svg(many))
    assert "11" in texts(to_svg(SPANS))


@pytest.mark.parametrize("spans", [[], [Span(0, 0, "forward", 0, 1.0, 1.0)]])
def test_nothing_to_draw(spans: list[Span], tmp_path: Path) -> None:
    ElementTree.fromstring(to_svg(spans))
    assert [e for e in to_perfetto(spans)["traceEvents"] if e["ph"] == "X"] == [] or spans
    pytest.importorskip("matplotlib")
    to_png(spans, tmp_path / "empty.png")


def test_png(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    to_png(SPANS, tmp_path / "timeline.png", "title")
    pixels = image.imread(tmp_path / "timeline.png")
    assert pixels.shape[:2] == (423, 1500)
    for kind in ("forward", "backward"):
        rgb = [int(COLOURS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(pixels[:, :, :3] - rgb).max(axis=2) < 0.01).mean() > 0.03


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib: pip install .*plot.*to_svg"):
        to_png(SPANS, tmp_path / "timeline.png")


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
