"""Gradients of tied parameters, the norm over all stages, and loss scaling."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.tensors import norm_over_ranks
from lightning_smddp.pipeline.mesh import Ownership, held_parameters
from lightning_smddp.pipeline.state.gradients import TiedGradients, clip_by_norm, overflow_of, overflow_shared
from lightning_smddp.pipeline.state.meta_parameters import release
from lightning_smddp.pipeline.state.optimizer import OptimizerPartition
from lightning_smddp.sharding.optimizer_shards import all_parameters
from tests.pipeline.models import OWNERSHIP, seeded, tied, train_step
from tests.ranks import run_in_threads

CPU = torch.device("cpu")
TIED = Ownership({"0": (0, 1), "1": (1, 0), "2": (0,), "3": (0, 1), "4": (0, 1)}, {})


def tied_sums(group: dist.ProcessGroup, none_on: dict[str, tuple[int, ...]], sparse: bool) -> dict[str, object]:
    rank = group.rank()
    model = nn.ParameterList(torch.zeros(2, 3, dtype=torch.float64 if i == 1 else torch.float32) for i in range(5))
    model[4].requires_grad_(False)
    for name, parameter in model.named_parameters():
        if rank not in none_on.get(name, ()) and parameter.requires_grad:
            gradient = torch.full_like(parameter, 10.0**rank * (1 + int(name)))
            parameter.grad = gradient.to_sparse() if sparse else gradient
    gradients = [parameter.grad for parameter in model]
    TiedGradients(model, [(group, names) for names in TIED.shared().values()]).sum()
    if not sparse:  # in place: it may be a view of a bucket
        assert all(p.grad is old for p, old in zip(model, gradients, strict=True) if old is not None)
    return {
        name: None if p.grad is None else set(p.grad.to_dense().flatten().tolist())
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("sparse", [False, True])
def test_tied_gradients_are_summed_over_their_holders(sparse: bool) -> None:
    none_on = {"0": (1,), "3": (0, 1)}
    first, second = run_in_threads(tied_sums, 2, none_on, sparse)
    assert first == {"0": {1.0}, "1": {22.0}, "2": {3.0}, "3": None, "4": None}
    assert second == {**first, "2": {30.0}}  # 0 is nobody's on rank 1, which gets one; 2 is not shared


def gradients(scale: float = 1.0) -> dict[str, Tensor]:
    model = tied()
    train_step(model, 0)
    return {name: parameter.grad * scale for name, parameter in model.named_parameters()}


def with_gradients(group: dist.ProcessGroup, scale: float, spoil: float | None) -> dict[str, nn.Parameter]:
    """This rank's parameters."""
    model = tied()
    release(model, OWNERSHIP, group.rank())
    mine = held_parameters(model, OWNERSHIP, group.rank())
    everything = gradients(scale)
    for name, parameter in mine.items():
        parameter.grad = everything[name].clone()
    if spoil is not None and group.rank() == 1:
        model.head.bias.grad[0] = spoil
    return mine


def clipped(group: dist.ProcessGroup, max_norm: float, scale: float) -> tuple:
    mine = with_gradients(group, scale, None)
    owned = [parameter for name, parameter in mine.items() if OWNERSHIP.owner(name) == group.rank()]
    norm = clip_by_norm(list(mine.values()), owned, group, max_norm)
    return norm, {name: parameter.grad for name, parameter in mine.items()}


@pytest.mark.parametrize(("max_norm", "scale"), [(0.05, 1.0), (1e6, 1.0), (1.0, 1e25)])
def test_clipping_is_that_of_one_process(max_norm: float, scale: float) -> None:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients().values()]
    for parameter, gradient in zip(parameters, gradients(scale).values(), strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    results = run_in_threads(clipped, 2, max_norm, scale)
    names = list(gradients())
    for norm, after in results:
        assert norm == results[0][0]
        if expected.isfinite():
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            for name, gradient in after.items():
                torch.testing.assert_close(gradient, parameters[names.index(name)].grad, rtol=2e-6, atol=1e-12)
    assert torch.equal(results[0][1]["embedding.weight"], results[1][1]["embedding.weight"])


def norm_of_all(group: dist.ProcessGroup, norm_type: float, scale: float, spoil: float | None) -> Tensor:
    mine = with_gradients(group, scale, spoil)
    owned = [p.grad for name, p in mine.items() if OWNERSHIP.owner(name) == group.rank()]
    return norm_over_ranks(owned, group, norm_type, CPU)


@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, inf])
@pytest.mark.parametrize(("scale", "spoil"), [(1.0, None), (1e10, None), (1.0, nan), (1.0, inf)])
def test_norm_is_that_of_one_process(norm_type: float, scale: float, spoil: float | None) -> None:
    """On all stages, also where one of them has what is not finite."""
    everything = gradients(scale)
    if spoil is not None:
        everything["head.bias"][0] = spoil
    expected = torch.nn.utils.get_total_norm(list(everything.values()), norm_type)
    for norm in run_in_threads(norm_of_all, 2, norm_type, scale, spoil):
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, equal_nan=True)


def scaled_steps(group: dist.ProcessGroup, overflow_on: int | None, ownership: Ownership, fused: bool) -> list[float]:
    """Steps of which the second overflows; as Lightning's precision plugin does them."""
    rank = group.rank()
    model = seeded(lambda: nn.Linear(3, 2))
    reference = seeded(lambda: nn.Linear(3, 2))
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    release(model, ownership, rank)
    partition = OptimizerPartition(optimizer, names, ownership, rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale(reference(torch.ones(1, 3)).square().sum())
        reference.zero_grad()
        loss.backward()
        for name, parameter in held_parameters(model, ownership, rank).items():
            parameter.grad = dict(reference.named_parameters())[name].grad.clone()
        if step == 1 and overflow_on == rank:
            partition.parameters[0].grad.view(-1)[0] = inf
        before = [p.detach().clone() for p in partition.parameters]
        with overflow_shared(scaler, CPU, group):
            if not fused:  # which unscales in its step
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        overflowed = step == 1 and overflow_on is not None
        changed = any(not torch.equal(p, old) for p, old in zip(partition.parameters, before, strict=True))
        assert changed is (not overflowed and bool(partition.parameters))
        scaler.update()
        scales.append(scaler.get_scale())
    assert {id(p) for p in all_parameters(optimizer)} == names.keys()
    assert {id(p) for p in optimizer.state} == {id(p) for p in partition.parameters}
    return scales


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("overflow_on", "bias_on"), [(None, 1), (0, 1), (1, 1), (0, 0)])
def test_every_ranks_scaler_skips_the_same_step(overflow_on: int | None, bias_on: int, fused: bool) -> None:
    """Also that of a rank without parameters."""
    ownership = Ownership({"weight": (0,), "bias": (bias_on,)}, {})
    expected = [8.0, 16.0, 16.0, 32.0] if overflow_on is None else [8.0, 4.0, 4.0, 8.0]
    assert run_in_threads(scaled_steps, 2, overflow_on, ownership, fused) == [expected] * 2


def mixed_overflow(group: dist.ProcessGroup, value: float) -> bool:
    parameters = [nn.Parameter(torch.ones(3, 2, dtype=d)) for d in (torch.float16, torch.float32, torch.bfloat16)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    if group.rank() == 1:
        parameters[0].grad[0, 1] = value
    return overflow_of([*parameters, table.weight], CPU, group).item() == inf


@pytest.mark.parametrize(("value", "overflowed"), [(nan, True), (-inf, True), (65504.0, False)])
def test_overflow_in_any_dtype(value: float, overflowed: bool) -> None:
    assert run_in_threads(mixed_overflow, 2, value) == [overflowed] * 2
