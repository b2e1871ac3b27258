"""Gradients of tied parameters, the norm over all stages, and overflows on any of them."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.tensors import norm_over_ranks
from lightning_smddp.pipeline.mesh import Ownership, held_parameters
from lightning_smddp.pipeline.state.gradients import overflow_of, sum_tied
from lightning_smddp.pipeline.state.meta_parameters import release
from tests.pipeline.models import OWNERSHIP, tied, train_step
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
    sum_tied([(group, list(map(model.get_parameter, names))) for names in TIED.shared().values()])
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
