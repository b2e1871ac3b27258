"""Before training: ranks that trace a step together, what a resumed run takes over, and what the check finds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.graph_builder import Modules
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition import plan
from lightning_smddp.pipeline.partition.costs import LOOPBACK, cluster_of
from lightning_smddp.pipeline.partition.plan import OnAllRanks, Trial, make_plan
from lightning_smddp.pipeline.partition.self_check import EXACT, VerificationError, require_equal
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from tests.ranks import run_in_threads

CPU = torch.device("cpu")


def same(rank: int, meet: Callable[[str], None]) -> None:
    for place in "abc":
        meet(place)


def fails_first(rank: int, meet: Callable[[str], None]) -> None:
    meet("a")
    if rank == 1:
        raise KeyError("mine")
    meet("b")


def elsewhere(rank: int, meet: Callable[[str], None]) -> None:
    meet(f"place {rank}")


def swallows(rank: int, meet: Callable[[str], None]) -> None:
    try:
        fails_first(rank, meet)
    except SplitError:
        meet("c")


def body(group: dist.ProcessGroup, attempt: Callable[..., Any]) -> str:
    together = OnAllRanks(group)
    try:
        together.run(lambda: attempt(group.rank(), together.check))
    except SplitError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (same, "fine"),
        (fails_first, "The step failed on rank 1 while it was traced: KeyError('mine')"),
        (swallows, "The step failed on rank 1 while it was traced: KeyError('mine')"),
        (elsewhere, "another path on each rank: while it was traced it came to place 0 on rank 0"),
    ],
)
def test_what_ends_one_ends_all(attempt: Callable[..., Any], message: str) -> None:
    for told in run_in_threads(body, 2, attempt):
        assert message in told


def test_memory_of_an_exchange_is_none_that_the_step_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet where a parameter is fetched; what they send may be there still when the step is over."""
    sent = torch.from_numpy(np.zeros(2))

    def gather(value: Any, group: Any) -> list[Any]:
        sent.fill_(1)
        return [value]

    monkeypatch.setattr(plan, "gather", gather)
    root = nn.Linear(2, 2, device="meta")
    group: Any = None
    fetched = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    traced = plan.record(lambda: root(torch.ones(1, 2)).sum(), root, CPU, group, lambda name: fetched[name].clone())
    assert sent.tolist() == [1, 1]
    assert traced.external_writes == ()


class Scaled(nn.Module):
    """Keeps a number of the first batch, as torchvision's detectors do: behind training only the rank that runs it."""

    scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = float(x.max())
        return x * self.scale


def traced_with(group: dist.ProcessGroup) -> bool:
    root = nn.Sequential(Scaled(), nn.Linear(2, 2))
    if group.rank() == 1:
        root[0].scale = 1.0
    for turn in range(group.size()):  # threads have random numbers in common, which a trace looks at and seeds
        group.barrier().wait()
        if turn == group.rank():
            traced = plan.record(lambda: root(torch.ones(1, 2)).sum(), root, CPU, None)
    assert traced.reads_batch == (group.rank() == 0)
    return plan.same_graph(traced, Modules(traced, root), {"0", "1"}, group).reads_batch


def test_what_one_rank_reads_all_ranks_know_of() -> None:
    """Else one alone would meet the others to say whether it finds its path again."""
    assert run_in_threads(traced_with, 2) == [True, True]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_cannot_be_put_back_is_left() -> None:
    """Attributes that a step has set to tensors of another stage; buffers of scripted modules."""
    root = nn.ModuleDict({"norm": torch.jit.script(nn.BatchNorm1d(2)), "kept": nn.Identity()})
    remote = torch.ones(2).as_subclass(RemoteTensor)
    remote.run = SimpleNamespace(device=CPU)
    root["kept"].shown = remote
    with preserve_state(root, CPU):
        root["norm"](torch.randn(4, 2))
        root["kept"].shown = None
    assert root["kept"].shown is remote
    assert root["norm"].num_batches_tracked == 0


# ---- a resumed run ----


def divided_again(group: dist.ProcessGroup) -> tuple[int, list[int], int]:
    """Where the second stage begins in an earlier plan; all stages with it; runs, also with that of another step."""
    root, runs = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), []

    def step() -> torch.Tensor:
        runs.append(None)
        loss: torch.Tensor = root(torch.ones(1, 2)).sum()
        return loss

    def divided(known: Any = None) -> plan.PartitionPlan:
        return make_plan(Trial(step, lambda loss: loss), root, CPU, group, cluster, None, False, known)

    cluster = cluster_of(root, None, [0, 0], [1, 1], (LOOPBACK,))
    decision = divided().decision
    cut = 3 - decision["splitting"]["cuts"][0]  # the other possible one
    known = {**decision, "splitting": {**decision["splitting"], "cuts": [cut]}}
    kept = [stage.begin for stage in divided(known).stages]
    divided({**known, "digest": "of another step"})
    return cut, kept, len(runs)


def test_a_resumed_run_keeps_its_stages_if_the_step_is_the_same() -> None:
    ((cut, kept, runs),) = run_in_threads(divided_again, 1)
    assert kept == [0, cut]
    assert runs == 5  # a trace each, and a measurement where the stages are not known


# ---- what the comparison before training takes for a difference ----


def compare(expected: float, actual: float) -> None:
    """Of a bias whose gradient is small beside the whole one's."""
    nodes: Any = [SimpleNamespace(module=name, parameters=(f"{name}.p",)) for name in ("layer", "last")]
    norms, other = ({"layer.p": value, "last.p": 0.1} for value in (expected, actual))
    require_equal(nodes, (1.0, norms), (1.0, other), EXACT)


@pytest.mark.parametrize("actual", [3.1e-08, 0.0, 9e-08])
def test_what_rounding_leaves_of_a_gradient_is_no_difference(actual: float) -> None:
    compare(1.5e-08, actual)


@pytest.mark.parametrize(("expected", "actual"), [(1e-2, 1.002e-2), (0.0, 1e-6), (1e-5, 1.1e-5), (0.05, float("nan"))])
def test_small_gradients_may_not_differ(expected: float, actual: float) -> None:
    with pytest.raises(VerificationError, match="the gradient of 'layer' has norm"):
        compare(expected, actual)
