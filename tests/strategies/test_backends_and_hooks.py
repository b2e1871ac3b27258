"""The process group's backend, means without ReduceOp.AVG, and communication hooks of the user's own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_smddp import PipelineStrategy, SMDDPFabricStrategy, SMDDPStrategy
from lightning_smddp.strategies.options import CommunicationOptions, GradientOptions
from lightning_smddp.strategies.session import GradientCommunication
from tests.ranks import run_ranks, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, Outcome, assert_equal, fit, make_trainer, silent

# ---- backend ----

CPU = torch.device("cpu")


def test_the_closed_library_of_aws_is_refused_with_the_cure() -> None:
    said = "'smddp' is AWS's closed library.*PyTorch 2.4.* Leave process_group_backend out"
    for strategy in (SMDDPStrategy, SMDDPFabricStrategy, PipelineStrategy):
        with pytest.raises(ValueError, match=said):
            strategy(process_group_backend="smddp")


def backends(options: dict[str, Any]) -> tuple[str, str | None]:
    strategy = silent(**options)
    make_trainer(strategy, max_steps=1).fit(Learner())
    return dist.get_backend(), strategy.process_group_backend


@pytest.mark.parametrize("backend", ["auto", None, "gloo"])
def test_gloo_on_cpu(backend: str | None) -> None:
    assert run_trainer_ranks(backends, 2, {"process_group_backend": backend}) == [("gloo", "gloo")] * 2


@pytest.mark.simulated_cuda
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_gloo_beside_nccl_on_gpus(backend: str) -> None:
    found = run_trainer_ranks(backends, 2, {"process_group_backend": backend})
    assert found == [("cpu:gloo,cuda:nccl", "nccl")] * 2


# ---- means ----


def reduce_values(backend_name: str) -> dict[str, Any]:
    """Reduce through both strategies, while the group says it has another backend; which operations arrive?"""
    operations = []
    all_reduce, get_backend = dist.all_reduce, dist.get_backend

    def recorded(tensor: Any, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        operations.append(str(op))
        return all_reduce(tensor, op, *args, **kwargs)

    rank = dist.get_rank()
    trainer, fabric = silent(), SMDDPFabricStrategy(**grouped(verbose=False))
    trainer.parallel_devices = [CPU] * 2
    trainer.cluster_environment = LightningEnvironment()
    trainer.set_world_ranks()
    results: dict[str, Any] = {}
    dist.all_reduce, dist.get_backend = recorded, lambda group=None: backend_name
    try:
        for name, reduce in (("trainer", trainer.reduce), ("fabric", fabric.all_reduce)):
            results[f"{name} mean"] = reduce(torch.tensor([1.0, 2.0]) + rank).tolist()
            results[f"{name} avg"] = reduce(torch.tensor(1.0 + rank), reduce_op="avg").item()
            results[f"{name} AVG"] = reduce(torch.tensor(1.0 + rank), reduce_op=dist.ReduceOp.AVG).item()
            results[f"{name} upper"] = reduce(torch.tensor(1.0 + rank), reduce_op="AVG").item()
            results[f"{name} half"] = reduce(torch.tensor(1.0 + rank, dtype=torch.bfloat16)).item()
            mean = reduce(torch.tensor([3, 5]) + 2 * rank)
            results[f"{name} integers"] = (mean.tolist(), str(mean.dtype))
            results[f"{name} sum"] = reduce(torch.tensor(1 + rank), reduce_op="sum").item()
            results[f"{name} max"] = reduce(torch.tensor(1 + rank), reduce_op="max").item()
            results[f"{name} group"] = reduce(torch.tensor(1.0 + rank), group=dist.group.WORLD).item()
            results[f"{name} other"] = reduce("no tensor")
        results["all"] = trainer.reduce_boolean_decision(rank == 0)
        results["any"] = trainer.reduce_boolean_decision(rank == 0, all=False)
        results["both"] = trainer.reduce_boolean_decision(True)
    finally:
        dist.all_reduce, dist.get_backend = all_reduce, get_backend
    results["operations"] = sorted(set(operations))
    return results


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_means_do_not_need_avg(backend: str) -> None:
    for results in run_ranks(reduce_values, 2, backend):
        assert not any("AVG" in operation for operation in results["operations"])
        for name in ("trainer", "fabric"):
            assert results[f"{name} mean"] == [1.5, 2.5]
            for kind in ("avg", "AVG", "upper", "half", "group"):
                assert results[f"{name} {kind}"] == 1.5
            assert results[f"{name} integers"] == ([4, 6], "torch.int64")
            assert results[f"{name} sum"] == 3
            assert results[f"{name} max"] == 2
            assert results[f"{name} other"] == "no tensor"
        assert (results["all"], results["any"], results["both"]) == (False, True, True)


# ---- hooks ----


class Counting:
    def __init__(self) -> None:
        self.buckets = 0
        self.wrapped = 0


def counting_hook(state, bucket):  # DDP refuses annotations that are strings, as they are in this file
    state.buckets += 1
    return allreduce_hook(dist.group.WORLD, bucket)


def fit_with_hooks() -> tuple[list[Outcome], int, int, Any]:
    counting = Counting()

    def wrapper(hook: Any) -> Any:
        counting.wrapped += 1
        return hook

    strategies: list[Any] = [
        "ddp",
        silent(ddp_comm_hook=allreduce_hook),
        silent(ddp_comm_hook=counting_hook, ddp_comm_state=counting, ddp_comm_wrapper=wrapper, bucket_cap_mb=0.0001),
    ]
    outcomes = [fit(strategy, Learner()) for strategy in strategies]
    return outcomes, counting.buckets, counting.wrapped, strategies[-1].communication_report


@pytest.mark.slow
def test_a_hook_of_the_user_is_honoured_on_cpu() -> None:
    for (stock, plain, counted), buckets, wrapped, report in run_trainer_ranks(fit_with_hooks, 2):
        assert_equal(plain, stock)
        assert_equal(counted, stock)
        assert buckets > 12  # 12 steps; after the first, several buckets
        assert wrapped == 1
        assert report is None  # nothing of ours ran


def test_strategy_objects_know_their_backend() -> None:
    assert SMDDPStrategy(process_group_backend="gloo").process_group_backend == "gloo"
    assert SMDDPStrategy().process_group_backend is None


# ---- timeouts ----


def wait_for_a_peer(options: dict[str, Any]) -> float:
    model = Learner()
    strategy = silent(**options)

    def late(*_: Any) -> None:
        if strategy.global_rank == 1:
            time.sleep(3)

    model.on_train_batch_start = late  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        make_trainer(strategy, max_steps=2).fit(model)
    return time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [pytest.param("native", marks=pytest.mark.exhaustive), "shared_memory"])
def test_collective_timeout_is_that_of_the_default_group_and_of_shared_memory(algorithm: str) -> None:
    options = {"collective_timeout": 1.0, "algorithm": algorithm}
    first, _ = run_trainer_ranks(wait_for_a_peer, 2, options, timeout=30)
    assert first < 2.9


def _leave_in_order() -> tuple[bool, bool]:
    communication = CommunicationOptions(verbose=False)
    strategy = GradientCommunication(GradientOptions("auto", None, None, communication))
    strategy.process_group_started()
    registered = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atexit.register", lambda *call: registered.append(call))
        strategy.process_group_started()
    leave, reference = registered[0]
    before = dist.is_initialized()
    leave(reference)
    return before, dist.is_initialized()


@pytest.mark.slow
def test_the_process_group_ends_before_the_interpreter() -> None:
    assert run_ranks(_leave_in_order, 2) == [(True, False)] * 2
