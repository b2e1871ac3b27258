"""The clock of the gradient exchange, and the report that is made of it."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication import report as reports
from lightning_smddp.communication.report import CommunicationReport, Recorder, Totals, _straggler
from tests.communication.training import hooked
from tests.ranks import run_ranks

CPU = torch.device("cpu")


class Clock:
    """``time.perf_counter`` by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(reports.time, "perf_counter", lambda: self.now)

    def __call__(self, now: float) -> None:
        self.now = 100.0 + now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_synchronous_bucket_is_exposed_whole(clock: Clock) -> None:
    recorder = Recorder(CPU)
    recorder.bucket_started(first=True)
    clock(2)
    recorder.hook_left(1000)
    recorder.bucket_done()
    clock(9)
    totals = recorder.read()
    assert (totals.steps, totals.gradient_bytes) == (1, 1000)
    assert (totals.exposed_s, totals.hidden_s) == (2.0, 0.0)
    assert recorder.last_exposed_s == 2.0


def test_what_runs_behind_backward_is_hidden_and_the_rest_exposed(clock: Clock) -> None:
    recorder = Recorder(CPU)
    recorder.bucket_started(first=True)
    recorder.hook_left(10)
    clock(3)
    recorder.bucket_started(first=False)
    clock(4)  # a second in the hook
    recorder.hook_left(20)
    clock(5)
    recorder.bucket_done()
    clock(7)  # three seconds after the last hook
    recorder.bucket_done()
    totals = recorder.read()
    assert (totals.exposed_s, totals.hidden_s) == (4.0, 3.0)
    assert totals.gradient_bytes == 30


def test_time_with_nothing_in_flight_is_not_communication(clock: Clock) -> None:
    recorder = Recorder(CPU)
    for start in (0.0, 10.0):
        clock(start)
        recorder.bucket_started(first=start == 0.0)
        recorder.hook_left(0)
        clock(start + 2)
        recorder.bucket_done()
    totals = recorder.read()
    assert (totals.exposed_s, totals.hidden_s) == (2.0, 2.0)


def test_steps_add_up_and_reading_twice_counts_once(clock: Clock) -> None:
    recorder = Recorder(CPU)
    for step in range(3):
        clock(10.0 * step)
        recorder.bucket_started(first=True)
        clock(10.0 * step + 1)
        recorder.hook_left(5)
        recorder.bucket_done()
    recorder.on_wait(0.5, 1)
    recorder.on_wait(0.25, None)
    recorder.on_wait(0.25, 1)
    for _ in range(2):
        totals = recorder.read()
        assert (totals.steps, totals.exposed_s, totals.gradient_bytes) == (3, 3.0, 15)
        assert (totals.waited_s, totals.waited_for) == (1.0, Counter({1: 2}))


def test_a_fresh_recorder_has_nothing() -> None:
    assert Recorder(CPU).read() == Totals()


@pytest.mark.parametrize(
    ("waited", "waited_for", "expected"),
    [
        ([5.0, 0.1, 5.0], [{1: 9}, {}, {1: 8, 0: 2}], 1),
        ([5.0, 0.1], [{}, {}], 1),  # without names: who waited least
        ([5.0, 4.0], [{1: 9}, {0: 9}], None),  # all wait alike
        ([1e-5, 1e-6], [{1: 9}, {}], None),  # nobody waits much
        ([5.0], [{}], None),
    ],
)
def test_the_straggler_is_whom_those_waited_for_that_waited_long(
    waited: list[float], waited_for: list[dict[int, int]], expected: int | None
) -> None:
    assert _straggler(waited, [Counter(counts) for counts in waited_for], steps=10) == expected


def report(algorithm: str, steps: int, slow_rank: int = -1) -> CommunicationReport:
    with hooked(algorithm) as wrapper:
        torch.manual_seed(0)
        ddp = wrapper.wrap(nn.Linear(100, 100, bias=False))
        for _ in range(steps):
            if dist.get_rank() == slow_rank:
                time.sleep(0.05)
            ddp(torch.ones(1, 100)).sum().backward()
        return wrapper.synchronizers[0].report()


GRADIENTS = 100 * 100 * 4


@pytest.mark.parametrize(("algorithm", "nodes"), [("shared_memory", "aa"), ("hierarchical", "ab")])
def test_all_ranks_report_the_same(algorithm: str, nodes: str) -> None:
    results = run_ranks(report, 2, algorithm, 3, node_ids=list(nodes))
    assert results[0] == results[1]
    assert (results[0].steps, results[0].gradient_bytes) == (3, 3 * GRADIENTS)
    assert len(results[0].exposed_s) == len(results[0].hidden_s) == len(results[0].waited_s) == 2


@pytest.mark.parametrize(("algorithm", "nodes"), [("shared_memory", "aaa"), ("native", "aab"), ("hierarchical", "ab")])
def test_the_rank_that_is_late_is_named(algorithm: str, nodes: str) -> None:
    result = run_ranks(report, len(nodes), algorithm, 6, 1, node_ids=list(nodes))[0]
    assert result.straggler == 1
    host, local = ("b", 0) if nodes == "ab" else ("a", 1)
    assert result.straggler_name == f"rank 1 (host {host}, local rank {local})"
    assert f"others waited most for rank 1 (host {host}" in str(result)
    others = [waited for rank, waited in enumerate(result.waited_s) if rank != 1]
    assert min(others) > 0.2  # of the 0.3 s that rank 1 slept
    assert result.waited_s[1] < 0.5 * min(others)


def test_a_report_reads_by_step() -> None:
    text = str(CommunicationReport(2, 2 * 2**20, (0.002, 0.004), (0.0, 0.0), (0.0, 0.0), None, ""))
    assert text.splitlines() == [
        "gradient communication over 2 steps",
        "  gradients             1.00 MiB a step on each rank",
        "  exposed               1.00, 2.00 ms a step, by rank",
        "  hidden by backward    0.00, 0.00 ms a step, by rank",
        "  waited for others     0.00, 0.00 ms a step, by rank",
    ]
