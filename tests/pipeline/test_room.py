"""Whether a module has room: all ranks answer alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.partition import costs
from lightning_smddp.pipeline.partition.costs import available_host_bytes, fits_on_devices, fits_on_hosts
from lightning_smddp.pipeline.state.meta_parameters import release
from lightning_smddp.pipeline.state.state_dict import unshard
from lightning_smddp.pipeline.view.view import GlobalView
from tests.ranks import run_ranks

CPU = torch.device("cpu")


ROOM: list[tuple[list[float], str, str, tuple[bool, bool]]] = [  # bytes free and host of each rank, device, answers
    ([9e6, 9e6], "aa", "meta", (True, True)),
    ([9e6, 1.5e6], "aa", "meta", (False, False)),  # two of 1 MB on one host
    ([9e6, 1.5e6], "ab", "meta", (False, True)),
    ([9e6, 0.0], "ab", "cpu", (False, True)),  # it is there already
]


def answers() -> list[tuple[bool, bool]]:
    """On devices and on hosts."""
    group, rank, found = dist.group.WORLD, dist.get_rank(), []
    assert group is not None
    for free, hosts, device, _ in ROOM:
        costs.free_device_bytes = lambda _, mine=free[rank]: mine
        costs.available_host_bytes = lambda mine=free[rank]: mine
        costs.node_identity = lambda host=hosts[rank]: host
        module = nn.Linear(500, 500, bias=False, device=device)  # 1 MB
        found.append((fits_on_devices(module, group, CPU), fits_on_hosts(module, group)))
    return found


def test_all_ranks_answer_alike() -> None:
    assert run_ranks(answers, 2) == [[answer for *_, answer in ROOM]] * 2


def test_free_memory_of_a_host_and_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_GROUPS", tmp_path)
    whole = available_host_bytes()
    assert 0 < whole < 1e15
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_host_bytes() == 2e6
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes() > 2e6


def gather_beside_parts() -> tuple[list[str], int]:
    """Where a divided module's parameters are after it was gathered; bytes that this took on the device."""
    group, device = dist.group.WORLD, torch.device("cuda", dist.get_rank())
    assert group is not None
    module = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(2))).to(device)
    ownership = Ownership({"0.weight": (0,), "1.weight": (1,)}, {}, 2)
    release(module, ownership, dist.get_rank())
    before = torch.cuda.memory_stats(device)["allocated_bytes.all.current"]
    unshard(GlobalView(module, ownership, group, device), to=CPU)
    places = [parameter.device.type for parameter in module.parameters()]
    return places, torch.cuda.memory_stats(device)["allocated_bytes.all.current"] - before


@pytest.mark.simulated_cuda
def test_other_ranks_parameters_come_to_the_host() -> None:
    (first, first_bytes), (second, second_bytes) = run_ranks(gather_beside_parts, 2, backend="nccl")
    assert (first, second) == (["cuda", "cpu"], ["cpu", "cuda"])
    assert (first_bytes, second_bytes) == (0, 0)
