"""The clock of the gradient exchange, and the report that is made of it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication import report as reports
from lightning_smddp.communication.report import CommunicationReport, Recorder, Totals, _straggler
from tests.communication.training import hooked
from tests.ranks import run_ranks

CPU = torch.device("cpu")


# Of each case the events with their times, and what then is exposed and hidden: (first bucket), (hook left), (done).
EVENTS: dict[str, tuple[list[tuple[float, str]], float, float]] = {
    "nothing": ([], 0.0, 0.0),
    "a synchronous bucket is exposed whole": ([(0, "first"), (2, "left"), (2, "done")], 2.0, 0.0),
    "what runs behind backward is hidden": (
        # a second in the second hook, and three behind the last one
        [(0, "first"), (0, "left"), (3, "next"), (4, "left"), (5, "done"), (7, "done")], 4.0, 3.0,
    ),
    "nothing in flight": (
        [(0, "first"), (0, "left"), (2, "done"), (10, "next"), (10, "left"), (12, "done")], 2.0, 2.0,
    ),
    "steps add up": ([(10.0 * i + j, event) for i in range(3) for j, event in enumerate(["first", "left", "done"])],
                     3.0 * 2, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("case", EVENTS)
def test_what_is_exposed_and_what_is_hidden(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events, exposed, hidden = EVENTS[case]
    now = [0.0]
    monkeypatch.setattr(reports.time, "perf_counter", lambda: 100.0 + now[0])
    recorder = Recorder(CPU)
    recorder.on_wait(9.0)  # of the self-test and the trial of algorithms, which are no step's
    for moment, event in events:
        now[0] = moment
        if event == "left":
            recorder.hook_left(10)
        elif event == "done":
            recorder.bucket_done()
        else:
            recorder.bucket_started(first=event == "first")
            recorder.on_wait(0.25)
    now[0] += 7
    recorder.on_wait(0.5)
    kinds = [event for _, event in events]
    waited = 0.25 * kinds.count("left")
    expected = Totals(kinds.count("first"), 10 * kinds.count("left"), exposed, hidden, waited)
    for _ in range(2):  # reading twice counts once
        assert recorder.read() == expected


@pytest.mark.parametrize(
    ("waited", "nodes", "expected"),
    [
        ([5.0, 0.1, 5.0], [(0, 1, 2)], 1),
        ([0.0, 0.1, 5.0, 0.2], [(0, 1), (2, 3)], 3),  # others may wait less, for nobody of their node
        ([5.0, 4.0], [(0, 1)], None),  # all wait alike
        ([1e-5, 1e-6], [(0, 1)], None),  # nobody waits much
        ([5.0], [(0,)], None),
    ],
)
def test_the_straggler_is_whom_those_waited_for_that_waited_long(
    waited: list[float], nodes: list[tuple[int, ...]], expected: int | None
) -> None:
    assert _straggler(waited, nodes, steps=10) == expected


def reports_of(algorithms: list[str], steps: int, slow_rank: int) -> list[CommunicationReport]:
    return [report(algorithm, steps, slow_rank) for algorithm in algorithms]


def report(algorithm: str, steps: int, slow_rank: int) -> CommunicationReport:
    with hooked(algorithm) as wrapper:
        torch.manual_seed(0)
        ddp = wrapper.wrap(nn.Linear(100, 100, bias=False))
        for _ in range(steps):
            if dist.get_rank() == slow_rank:
                time.sleep(0.2)
            ddp(torch.ones(1, 100)).sum().backward()
        return wrapper.synchronizers[0].report()


@pytest.mark.parametrize(
    ("algorithms", "nodes", "name"),
    [
        (["shared_memory"], "aaa", "rank 1 (host a, local rank 1)"),
        (["native", "hierarchical"], "ab", "rank 1 (host b, local rank 0)"),
    ],
)
def test_all_ranks_report_the_same_and_name_the_one_that_is_late(algorithms: list[str], nodes: str, name: str) -> None:
    results, *others = run_ranks(reports_of, len(nodes), algorithms, 3, 1, node_ids=list(nodes))
    assert all(other == results for other in others)
    for result in results:
        assert (result.steps, result.gradient_bytes) == (3, 3 * 100 * 100 * 4)
        assert len(result.exposed_s) == len(result.hidden_s) == len(result.waited_s) == len(nodes)
        assert result.straggler == 1
        assert result.straggler_name == name
        assert f"others waited most for {name[:-1]}" in str(result)
        waited = [seconds for rank, seconds in enumerate(result.waited_s) if rank != 1]
        assert min(waited) > 0.4  # of the 0.6 s that rank 1 slept
        assert result.waited_s[1] < 0.5 * min(waited)


def test_a_report_reads_by_step() -> None:
    text = str(CommunicationReport(2, 2 * 2**20, (0.002, 0.004), (0.0, 0.0), (0.0, 0.002), None, ""))
    assert text.splitlines() == [
        "gradient communication over 2 steps",
        "  gradients             1.00 MiB a step on each rank",
        "  exposed               1.00, 2.00 ms a step, by rank",
        "  waited for others     0.00, 1.00 ms a step, by rank",
    ]
