from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.wire.broadcast import HeaderCache, UnsendableError, broadcast_structure
from tests.ranks import RanksFailedError, run_in_threads

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Fields:
    ids: Any
    mask: Any


def everything() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex128]
    return {
        "tensors": [torch.randn(3, 5, generator=generator).abs().mul(3).to(dtype) for dtype in dtypes],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12.0).reshape(3, 4).t()[::2],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "nested": ({"list": [1, (2.5, None)], 3: True, None: "ü"}, [], {}),
        "numbers": [2**62, -(2**63), 2**80, -1, 0.1, float("inf"), np.float32(0.5), np.int64(7)],
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def body_everything(group: dist.ProcessGroup, src: int) -> bool:
    value = broadcast_structure(everything() if group.rank() == src else None, group, src, CPU)
    return same(value, everything())


@pytest.mark.parametrize("src", [0, 2])
def test_what_arrives_is_what_was_sent(src: int) -> None:
    assert run_in_threads(body_everything, 3, src) == [True] * 3


def body_apart(group: dist.ProcessGroup) -> list[bool]:
    """Received tensors do not share a version counter, and small ones do not keep large ones alive."""
    sent = [torch.zeros(1000, requires_grad=True), torch.zeros(3)]
    large, small = broadcast_structure(sent, group, 0, CPU)
    if group.rank() == 0:
        return []
    weight = torch.ones(1000, requires_grad=True)
    product = (large * weight).sum()
    small.add_(1)
    product.backward()
    return [not large.requires_grad, small.untyped_storage().nbytes() == 12]


class Lonely(int):
    """Tells a comparison for equality, by which a search through all integers would begin."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError(f"{int(self)} was compared with {other!r}")


class Colour(IntEnum):
    RED = 3


def body_subclasses_of_int(group: dist.ProcessGroup) -> Any:
    value = None
    if group.rank() == 0:
        value = [Lonely(7), [Colour.RED, Lonely(2**80)]]
    return broadcast_structure(value, group, 0, CPU)


def test_subclasses_of_int_arrive_as_numbers() -> None:
    """It hung: of an int's subclass ``in range(...)`` looks through all integers of 8 bytes, one after the other."""
    assert run_in_threads(body_subclasses_of_int, 2)[1] == [7, [3, 2**80]]


def test_received_tensors_are_independent() -> None:
    assert run_in_threads(body_apart, 2) == [[], [True, True]]


def body_like(group: dist.ProcessGroup, rank_value: Any, like: Any) -> Any:
    value = rank_value if group.rank() == 0 else None
    return broadcast_structure(value, group, 0, CPU, like=like)


@pytest.mark.parametrize(
    ("value", "like"),
    [
        (Fields([1], 2), Fields([0], 0)),
        (Pair(1, {"x": "y"}), Pair(0, OrderedDict(x=0))),
        (OrderedDict(a=1), OrderedDict(a=0)),
    ],
)
def test_containers_are_those_of_like(value: Any, like: Any) -> None:
    _, received = run_in_threads(body_like, 2, value, like)
    assert (type(received), received) == (type(value), value)


def test_another_structure_than_like_arrives_plain() -> None:
    assert run_in_threads(body_like, 2, {"a": 1}, Fields(0, 0))[1] == {"a": 1}
    assert run_in_threads(body_like, 2, Fields(1, 2), None)[1] == {"ids": 1, "mask": 2}


# ---- caches ----


@contextmanager
def counting() -> Iterator[list[int]]:
    """Bytes of each broadcast."""
    sizes: list[int] = []
    original: Callable[..., Any] = dist.broadcast

    def broadcast(tensor: Tensor, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return original(tensor, **kwargs)

    dist.broadcast = broadcast
    try:
        yield sizes
    finally:
        dist.broadcast = original


def body_cached(group: dist.ProcessGroup, values: list[Any]) -> bool:
    cache = HeaderCache()
    right = True
    for value in values:
        right &= same(broadcast_structure(value if group.rank() == 0 else None, group, 0, CPU, cache=cache), value)
    return right


def test_an_unchanged_header_is_not_sent_again() -> None:
    steps = [{"loss": 0.1 * i, "count": i, "logits": torch.full((4,), float(i))} for i in range(3)]
    large = [{"loss": torch.full((20000,), float(i))} for i in range(3)]
    for values, numbers in ((steps, [3, 1, 1]), (large, [3, 2, 2]), ([steps[0], *large[:2], steps[1]], [3, 3, 2, 3])):
        with counting() as sizes:
            assert run_in_threads(body_cached, 2, values) == [True, True]
        assert len(sizes) == 2 * sum(numbers)


# ---- what cannot be sent ----


def body_refused(group: dist.ProcessGroup, value: Any) -> list[str]:
    """Every rank raises, and the next structure arrives."""
    cache, texts = HeaderCache(), []
    for sent in ([1.0], value, [2.0]):
        try:
            received = broadcast_structure(sent if group.rank() == 0 else None, group, 0, CPU, cache=cache)
        except ValueError as error:
            texts.append(str(error))
        else:
            texts.append(str(received))
    return texts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [0, {1}]}, "['a'][1] is a set, which cannot be sent"),
        (object(), "The value is a object"),
        ({"x": {(1, 2): 0}}, "['x'] has the key (1, 2), a tuple"),
        ([torch.zeros(2, device="meta")], "[0] is a meta tensor; only dense tensors"),
        ([torch.eye(2).to_sparse()], "[0] is a torch.sparse_coo torch.float32 tensor"),
    ],
)
def test_what_cannot_be_sent_is_refused_on_every_rank(value: Any, text: str) -> None:
    for first, refused, last in run_in_threads(body_refused, 2, value):
        assert (first, last) == ("[1.0]", "[2.0]")
        assert refused.startswith(text)


def body_without_try(group: dist.ProcessGroup) -> None:
    broadcast_structure({0} if group.rank() == 0 else None, group, 0, CPU)


def test_the_error_is_a_value_error() -> None:
    assert issubclass(UnsendableError, ValueError)
    with pytest.raises(RanksFailedError, match="UnsendableError: The value is a set"):
        run_in_threads(body_without_try, 2)
