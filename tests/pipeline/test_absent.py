"""Parameters of other ranks cannot be used by mistake."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.state.meta_parameters import AbsentParameterError, release, set_contents
from lightning_smddp.pipeline.state.state_dict import load_full_state_dict


def divided() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parameters = {name: (0,) if name.startswith("0") else (1,) for name, _ in net.named_parameters()}
    release(net, Ownership(parameters, {}, 2), 0)
    return net


def test_what_would_do_nothing_is_an_error_with_its_place() -> None:
    net = divided()
    average = torch.zeros(2, 4)
    for use in (
        lambda: average.add_(net[1].weight.data),
        lambda: average.lerp_(net[1].weight, 0.5),
        lambda: torch._foreach_add_([average], [net[1].weight]),
        lambda: net[1].weight.norm(),
        lambda: net(torch.ones(1, 3)),
        lambda: copy.deepcopy(net),
        lambda: net.state_dict(),
    ):
        with pytest.raises(AbsentParameterError, match=r":\d+ uses parameter '1\.") as error:
            use()
        assert "on rank 1 of the pipeline" in str(error.value)
    assert not average.any()


def test_what_can_be_asked() -> None:
    net = divided()
    weight = net[1].weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.numel(), weight.dtype, weight.is_meta) == ((2, 4), 8, torch.float32, True)
    weight.requires_grad_(False)
    assert weight.grad is None
    assert not weight.requires_grad
    assert sum(p.numel() for p in net.parameters()) == 26
    assert torch.zeros_like(weight, device="cpu").sum() == 0
    loaded = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    load_full_state_dict(net, loaded)
    assert torch.equal(net[0].weight, loaded["0.weight"])
    assert weight.is_meta


def test_values_come_back() -> None:
    net = divided()
    weight = net[1].weight
    set_contents(weight, torch.ones(2, 4))
    assert type(weight) is nn.Parameter
    assert weight.sum().item() == 8
    assert pickle.loads(pickle.dumps(weight)).sum().item() == 8
