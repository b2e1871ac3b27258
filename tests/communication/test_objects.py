"""Objects between ranks: any value comes as it was, and an error on one rank is an error on all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication.objects import RankFailedError, UnsendableError, broadcast, each, first, gather
from tests.communication.errors import message_of
from tests.pipeline.models import assert_same
from tests.ranks import run_in_threads


def unsendable(group: dist.ProcessGroup) -> list[str]:
    odd: Any = threading.Lock() if group.rank() == 1 else None
    calls = [
        lambda: gather(odd, group),
        lambda: broadcast(odd, group, 1),
    ]
    messages = [message_of(UnsendableError, call) for call in calls]
    assert gather("next", group) == ["next", "next"]  # nobody is left behind
    return messages


def test_what_cannot_be_pickled_is_an_error_on_every_rank() -> None:
    for messages in run_in_threads(unsendable, 2):
        assert all("TypeError: cannot pickle '_thread.lock' object" in message for message in messages)


VALUES: list[Any] = [
    None, 2**80, float("inf"), "ü", b"\x00", Path("/tmp/x"), {1, 2}, np.float64(1.5), OrderedDict(a=(1, [None])),
    torch.float16, torch.tensor(True), torch.empty(0, 3), torch.ones(2, 3).t(), torch.tensor([1 + 2j]).conj(),
    [torch.ones(1000, dtype=torch.bfloat16), nn.Parameter(torch.ones(2))],
]  # fmt: skip


def send_all(group: dist.ProcessGroup) -> None:
    for value in VALUES:
        mine = value if group.rank() == 1 else "other"
        for received in (broadcast(mine, group, 1), gather(mine, group)[1]):
            assert type(received) is type(value)
            assert_same(received, value)
    assert type(received[1]) is nn.Parameter


def test_any_value_comes_as_it_was() -> None:
    run_in_threads(send_all, 2)


# ---- acting together ----


class OddError(Exception):
    """Cannot be made again from what pickle keeps."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


def act_together(group: dist.ProcessGroup, error: Exception) -> list[BaseException]:
    rank = group.rank()

    def fail_on_second() -> int:
        if rank == 1:
            raise error
        return rank

    def fail_on_first() -> int:
        if rank == 0:
            raise error
        raise AssertionError("the first alone acts")

    assert each(lambda: rank * 2, group) == [0, 2]
    assert first(lambda: ("done", rank), group) == ("done", 0)
    raised = []
    for together, act in ((each, fail_on_second), (first, fail_on_first)):
        try:
            together(act, group)
        except Exception as caught:
            raised.append(caught.with_traceback(None))  # whose frames hold the group
    assert len(raised) == 2
    return raised


def test_an_error_on_one_rank_is_an_error_on_all() -> None:
    error = FileNotFoundError(2, "No such file", "x.ckpt")
    (of_other, own), (own_too, of_other_too) = run_in_threads(act_together, 2, error)
    assert own is own_too is error
    for heard in (of_other, of_other_too):
        assert heard is not error
        assert type(heard) is FileNotFoundError
        assert (str(heard), heard.filename) == (str(error), "x.ckpt")


def test_an_error_that_cannot_travel_is_told() -> None:
    (of_other, own), _ = run_in_threads(act_together, 2, OddError("x.ckpt", "is damaged"))
    assert type(own) is OddError
    assert type(of_other) is RankFailedError
    assert "OddError: x.ckpt: is damaged" in str(of_other)


def test_a_process_in_no_job_acts_alone() -> None:
    assert gather("x") == ["x"]
    assert broadcast("x") == "x"
    assert first(lambda: "x") == "x"
    with pytest.raises(KeyError):
        first(lambda: {}["x"])
