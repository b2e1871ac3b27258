"""What stages send each other, and, where a step ends, its results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.capture.records import TensorSpec
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.runtime.messages import Layout, Neighbour
from lightning_smddp.pipeline.runtime.step_exchange import StepExchange
from tests.ranks import run_ranks

CPU = torch.device("cpu")

# ---- small tensors share a message, and arrive as tensors of their own ----

MANY = [
    torch.tensor([True, False, True]),
    torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).t(),
    torch.ones(200, 200).mul(0.5),  # 160 KB: a message of its own
    torch.empty(0, 4),
    torch.tensor(2.5, dtype=torch.float64),
    torch.complex(torch.ones(2), torch.ones(2)).conj(),
    torch.arange(4, dtype=torch.int8),
    torch.complex(torch.ones(1), torch.ones(1)).conj().imag,  # a view that negates
]
LARGE = [torch.complex(torch.ones(200, 100), torch.ones(200, 100)).conj()]
ALONE = [MANY[-1], torch.empty(0)]
CASES = [(MANY, 2), (ALONE, 1), (LARGE, 1), ([], 0), ([torch.empty(0), torch.empty(0)], 0)]


def exchanged(ahead: bool) -> list[tuple[list[Tensor], int]]:
    """What rank 1 has received of rank 0 as the second of two micro-batches, and how many messages rank 0 has sent."""
    found = []
    for sent, _ in CASES:
        rank = dist.get_rank()
        neighbour = Neighbour(dist.group.WORLD, 1 - rank, CPU, ahead)
        layout = Layout.of(list(map(TensorSpec.of, sent)))
        neighbour.begin_step([layout] * 2)
        for microbatch in (0, 1):
            ops = neighbour.sends(layout, sent) if rank == 0 else neighbour.receives(microbatch)
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        if rank == 1:
            neighbour.take(0)
        found.append((list(neighbour.take(1)), len(ops)))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(all_of_it, 3)


def all_of_it() -> dict[Any, Any]:
    found: dict[Any, Any] = {"results": received()}
    if dist.get_rank() < 2:
        found |= {ahead: exchanged(ahead) for ahead in (False, True)}
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_tensors_arrive_as_they_were_sent(ahead: bool, ranks: list[dict[Any, Any]]) -> None:
    sender, receiver = (rank[ahead] for rank in ranks[:2])
    for (sent, messages), (_, number), (received, _) in zip(CASES, sender, receiver, strict=True):
        assert number == messages
        for tensor, copy in zip(sent, received, strict=True):
            assert copy.dtype == tensor.dtype
            assert torch.equal(copy, tensor.resolve_conj())
            assert copy.untyped_storage().nbytes() == copy.nbytes  # one that is changed in place changes no other


# ---- results ----


@dataclass
class Shown:
    logs: list[tuple[str, Any]] = field(default_factory=list)
    output: Any = None


def of_step(step: int) -> Shown:
    logs = [("loss", torch.tensor(1.5 * step)), ("lr", 0.1 * step), ("rows", step), ("is_odd", step % 2 == 1)]
    return Shown(logs, {"rows": torch.arange(step * 3.0).view(step, 3), "name": "x", "none": None, "big": 2**70})


def exchange() -> tuple[StepExchange, bool]:
    """And whether results are from this rank."""
    group = dist.group.WORLD
    assert group is not None
    last = group.size() - 1
    return StepExchange(Channel(group, CPU), Channel(group, CPU), last), group.rank() == last


def received() -> list[Any]:
    """Results outgrow the word and fit into it again."""
    meeting, is_last = exchange()
    found = []
    for step in (1, 1, 2, 2, 3000, 3000, 2):
        found.append(meeting.run(of_step(step) if is_last else None, batch=step))
    found.append(meeting.run("a word" if is_last else None))
    found.append(meeting.run([math.inf, torch.empty(0)] if is_last else None))
    return found


def test_every_rank_has_the_results_of_the_last(ranks: list[dict[Any, Any]]) -> None:
    for found in (rank["results"] for rank in ranks):
        for step, shown in zip((1, 1, 2, 2, 3000, 3000, 2), found, strict=False):
            wanted = of_step(step)
            assert isinstance(shown, Shown)
            assert [(name, type(value)) for name, value in shown.logs] == [(n, type(v)) for n, v in wanted.logs]
            assert [float(value) for _, value in shown.logs] == [float(value) for _, value in wanted.logs]
            assert torch.equal(shown.output["rows"], wanted.output["rows"])
            assert {**shown.output, "rows": 0} == {**wanted.output, "rows": 0}
        assert found[-2] == "a word"
        assert found[-1][0] == math.inf
        assert found[-1][1].shape == (0,)
