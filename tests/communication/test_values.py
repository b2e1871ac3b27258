"""What can be broadcast without pickle, and what is refused."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_smddp.wire.values import ALLOW_PICKLE, broadcast_value
from tests.communication.errors import message_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")
VALUES: list[Any] = [
    None, True, 3, 2.5, float("inf"), "text", b"\x00\xff", Path("/tmp/x"), [1, [2, "three"]], (1, (None,)), {1, 2},
    {"a": {3: (4.0,)}, None: []}, torch.float16, torch.arange(6).view(2, 3), torch.tensor(True), torch.tensor([]),
    {"w": torch.ones(2, dtype=torch.bfloat16), "b": [torch.tensor(1j), "x", torch.tensor([True, False])]},
    {1: torch.tensor(1), "1": torch.tensor(2)},
]  # fmt: skip


class Marker:
    """Leaves a trace if it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return bool(one == other) and type(one) is type(other)


def round_trip(src: int) -> None:
    rank = dist.get_rank()
    for value in VALUES:
        received = broadcast_value(value if rank == src else f"rank {rank}'s", src, dist.group.WORLD, CPU)
        assert equal(value, received), (value, received)
    assert broadcast_value(np.float64(1.5) if rank == src else 0, src, dist.group.WORLD, CPU) == 1.5
    assert broadcast_value(OrderedDict(a=1) if rank == src else 0, src, dist.group.WORLD, CPU) == {"a": 1}


@pytest.mark.parametrize("src", [0, 1])
def test_values_arrive_as_they_were(src: int) -> None:
    run_ranks(round_trip, 2, src)


def refuse(path: str, allow: list[str]) -> list[str]:
    os.environ[ALLOW_PICKLE] = allow[dist.get_rank()]
    value = Marker(path) if dist.get_rank() == 0 else None
    said = message_of(ValueError, lambda: broadcast_value([1, value], 0, dist.group.WORLD, CPU))
    # the ranks are still in step
    return [said, broadcast_value("next" if dist.get_rank() == 0 else None, 0, dist.group.WORLD, CPU)]


def test_what_would_need_pickle_is_refused_on_every_rank(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    said = run_ranks(refuse, 2, str(marker), ["", ""])
    assert said[0] == said[1]
    assert said[0][1] == "next"
    for part in ("tests.communication.test_values.Marker cannot be broadcast", f"{ALLOW_PICKLE}=1"):
        assert part in said[0][0]
    assert not marker.exists()


def receive_only(path: str) -> None:
    os.environ[ALLOW_PICKLE] = str(int(dist.get_rank() == 0))
    value = Marker(path) if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:
        assert broadcast_value(value, 0, dist.group.WORLD, CPU) is value  # nor does the sender unpickle its own
    else:
        with pytest.raises(ValueError, match=rf"Rank 0 broadcast a pickled object. Set {ALLOW_PICKLE}=1 on all ranks"):
            broadcast_value(None, 0, dist.group.WORLD, CPU)
    dist.barrier()
    assert not Path(path).exists()


def allowed(path: str) -> None:
    os.environ[ALLOW_PICKLE] = "1"
    broadcast_value(Marker(path) if dist.get_rank() == 0 else None, 0, dist.group.WORLD, CPU)
    if dist.get_rank() == 1:
        assert Path(path).exists()


def test_pickle_needs_the_word_of_the_receiver(tmp_path: Path) -> None:
    run_ranks(receive_only, 2, str(tmp_path / "one"))
    run_ranks(allowed, 2, str(tmp_path / "all"))
