"""Spans show what each rank did when, and when it had to wait."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.runtime.spans import Span, SpanRecorder
from tests.pipeline.pipeline_chains import CPU, HIDDEN, Engine, two_stages
from tests.ranks import run_ranks


def recorded(name: str) -> list[Span]:
    bodies = two_stages()
    slow, healthy = dist.get_world_size() - 1, bodies[-1].function

    def sleep_first(*arguments: Any) -> tuple[Tensor, ...]:
        time.sleep(0.1)
        return healthy(*arguments)

    bodies[slow].function = sleep_first
    recorder = SpanRecorder(dist.get_rank(), CPU)
    engine = Engine(name, bodies, recorder=recorder)
    start = time.perf_counter()
    engine.train([[[HIDDEN]]] * 2)
    engine.evaluate([[[HIDDEN]]])
    spans = recorder.take()
    assert recorder.take() == []
    assert spans[0].start_s >= start
    assert spans[-1].end_s <= time.perf_counter()
    return spans


def test_spans_tell_what_each_rank_did_and_for_whom_it_waited() -> None:
    first, last = run_ranks(recorded, 2, "gpipe")
    for rank, spans in enumerate((first, last)):
        work = [(span.kind, span.microbatch) for span in spans if span.kind not in ("wait", "send")]
        assert work == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1), ("forward", 0)]
        assert {(span.rank, span.stage) for span in spans} == {(rank, rank)}
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.end_s <= after.start_s or before.end_s == pytest.approx(after.start_s)
            assert before.start_s <= before.end_s
    seconds: Counter[tuple[int, str]] = Counter()
    for span in (*first, *last):
        seconds[span.rank, span.kind] += span.end_s - span.start_s
    assert seconds[1, "forward"] >= 0.3
    assert seconds[0, "wait"] > 0.15  # for the last rank's two forwards before its first backward
    assert seconds[0, "forward"] < 0.25


def split_kinds() -> set[str]:
    recorder = SpanRecorder(0, CPU)
    Engine("interleaved_zero_bubble", two_stages(), recorder=recorder).train([[[HIDDEN]]] * 2)
    return {span.kind for span in recorder.take()}


def test_spans_of_split_backwards() -> None:
    assert run_ranks(split_kinds, 1) == [{"forward", "backward_input", "backward_weight", "wait", "send"}]
