"""A model with a tied parameter, buffers and extra state, and how it is divided between two ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pytree import members_of

WORDS, WIDTH = 11, 6
T = TypeVar("T")

# The first optimizer of a process sets an environment variable of torch's compiler: not during a test.
torch.optim.SGD([torch.zeros(1)])


class Norm(nn.BatchNorm1d):
    pass


class Tied(nn.Module):
    """Embedding, body, batch norm and a head that has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = Norm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.favourites = [self.embedding.weight, self.body.weight]  # a user's own references
        self.note = "?"

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embedding(words)).tanh()))

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


OWNERSHIP = Ownership(
    parameters={
        "embedding.weight": (1, 0),  # the owner need not be the first stage
        "body.weight": (0,),
        "body.bias": (0,),
        "norm.weight": (1,),
        "norm.bias": (1,),
        "head.bias": (1,),
    },
    buffers={"norm.running_mean": 1, "norm.running_var": 1, "norm.num_batches_tracked": 1},
)


_GENERATOR = threading.Lock()  # ranks may be threads, and torch's generator is one for all


def seeded(build: Callable[[], T], seed: int = 0) -> T:
    """The same values on every rank, be it a thread."""
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def tied(seed: int = 0) -> Tied:
    return seeded(Tied, seed)


def words(seed: int, count: int = 8) -> Tensor:
    return torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed))


def train_step(model: nn.Module, seed: int) -> None:
    """Gradients of one batch."""
    nn.functional.cross_entropy(model(words(seed)), words(seed + 1000)).backward()


def assert_same(left: Any, right: Any, path: str = "", rtol: float = 0.0, atol: float = 0.0) -> None:
    """With types and order of keys; numbers bit by bit unless tolerances are given."""
    assert type(left) is type(right), f"{path}: {type(left)} and {type(right)}"
    members = members_of(left)
    if members is not None:
        others = members_of(right) or []
        assert [key for key, _ in members] == [key for key, _ in others], path
        for (key, mine), (_, other) in zip(members, others, strict=True):
            assert_same(mine, other, f"{path}/{key}", rtol, atol)
    elif isinstance(left, (Tensor, float)):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol, msg=lambda text: f"{path}: {text}")
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype, path
        assert np.array_equal(left, right), f"{path}: {left} and {right}"
    else:
        assert left == right, f"{path}: {left} and {right}"


def count_collectives(*names: str, module: Any = dist) -> list[str]:
    """Names of the functions of ``module`` that this process calls from now on, of those that are given."""
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name in names:
        setattr(module, name, counted(name, getattr(module, name)))
    return calls
