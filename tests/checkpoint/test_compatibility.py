"""Whether a checkpoint fits, found out before anything is changed."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torchmetrics.classification import MulticlassAccuracy

from lightning_smddp.checkpoint.compatibility import check_compatibility, compare_states
from lightning_smddp.checkpoint.errors import CheckpointError

SGD([nn.Parameter(torch.zeros(1))])  # the first optimizer imports torch's compiler, which sets environment variables


class Net(nn.Module):
    def __init__(self, hidden: int = 4, layers: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(layers))
        self.norm = nn.BatchNorm1d(hidden)
        self.tied = self.layers[0]
        self.register_buffer("cache", torch.zeros(hidden), persistent=False)


def trained(module: nn.Module, kind: type[Optimizer] = Adam, **options: Any) -> Optimizer:
    optimizer = kind(module.parameters(), lr=0.1, **options)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def checkpoint(module: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    states = [optimizer.state_dict() for optimizer in optimizers]
    return {"state_dict": module.state_dict(), "optimizer_states": states}


def refused(saved: dict[str, Any], module: nn.Module, *optimizers: Optimizer, strict: bool = True) -> str:
    before = copy.deepcopy([module.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)])
    with pytest.raises(CheckpointError) as caught:
        check_compatibility(saved, module, optimizers, strict, "runs/a.ckpt")
    after = [module.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]
    assert str(after) == str(before)
    assert str(caught.value).startswith("runs/a.ckpt: does not fit: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_fits() -> None:
    net = Net()
    saved = checkpoint(net, trained(net), trained(net, SGD))
    other = Net()
    check_compatibility(saved, other, [Adam(other.parameters()), SGD(other.parameters())])
    check_compatibility(saved, other, [AdamW(other.parameters()), SGD(other.parameters(), momentum=0.9)])  # alike
    check_compatibility(saved, Net().to("meta"))
    del saved["optimizer_states"]
    check_compatibility(saved, other, [Adam(other.parameters())])


def test_another_size() -> None:
    message = refused(checkpoint(Net(4)), Net(6))
    assert "of another shape (10): layers.0.weight is [4, 4] in the checkpoint and [6, 6] in the model" in message
    assert "missing" not in message


def test_more_names_than_fit_in_a_line() -> None:
    message = refused(checkpoint(Net(layers=2)), Net(layers=20))
    assert re.search(r"missing in the checkpoint \(36\): layers\.2\.weight, .* and 26 more", message)


def test_other_names() -> None:
    message = refused(checkpoint(Net(layers=1)), Net(layers=2, bias=False))
    assert "missing in the checkpoint (1): layers.1.weight" in message
    assert "not in the model (2): layers.0.bias, tied.bias" in message
    check_compatibility(checkpoint(Net(layers=1)), Net(layers=2, bias=False), strict=False)
    assert "another shape" in refused(checkpoint(Net(4, layers=1)), Net(5), strict=False)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda n: [], "it has the states of 0 optimizers, the model has 1"),
        (lambda n: [trained(n), trained(n)], "it has the states of 2 optimizers, the model has 1"),
        (lambda n: [trained(n, SGD)], "another kind of optimizer, without betas, eps"),
        (lambda n: [trained(n.norm)], "the checkpoint has parameter groups of 2 parameters, the model of 6"),
    ],
    ids=["none", "two", "SGD", "fewer"],
)
def test_other_optimizers(make: Any, problem: str) -> None:
    net = Net()
    assert problem in refused(checkpoint(net, *make(net)), net, Adam(net.parameters()))


def test_another_order_of_parameters() -> None:
    """Number and names are right, but each state belongs to another parameter."""
    net = Net()
    saved = checkpoint(net, trained(net))
    message = refused(saved, net, Adam(reversed(list(net.parameters()))))
    assert "exp_avg of parameter 0 is [4, 4] in the checkpoint and [4] in the model" in message


# ---- what torch would accept is accepted ----


class Renaming(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


class Extra(nn.Module):
    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()) if scalar else torch.ones(1))
        self.lazy = nn.LazyLinear(4)
        self.renaming = Renaming()
        self.accuracy = MulticlassAccuracy(3)
        self.accuracy.persistent(True)
        self.norm = nn.BatchNorm1d(3)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}


def test_modules_with_ways_of_their_own() -> None:
    source = Extra(scalar=False)
    source.lazy(torch.zeros(2, 5))
    state = dict(source.state_dict())
    state["renaming.kernel"] = state.pop("renaming.weight")
    del state["norm.num_batches_tracked"]
    check_compatibility({"state_dict": state}, Extra())
    Extra().load_state_dict(state)  # torch thinks so too
    del state["_extra_state"]
    assert "missing in the checkpoint (1): _extra_state" in refused({"state_dict": state}, Extra())


class Overriding(Net):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({"norm.weight": state_dict["w"]}, strict=False)


def test_a_module_that_loads_itself() -> None:
    check_compatibility({"state_dict": {"w": torch.zeros(4)}}, Overriding())


def test_names_and_shapes_alone() -> None:
    """As a rank needs it that has a part of a model."""
    assert compare_states({"a": (2, 3), "b": None}, {"a": torch.zeros(2, 3), "b": 1}) == []
    assert compare_states({"a": (2, 3)}, {"a": torch.zeros(2, 2), "b": 1}) == [
        "of another shape (1): a is [2, 2] in the checkpoint and [2, 3] in the model",
        "not in the model (1): b",
    ]
