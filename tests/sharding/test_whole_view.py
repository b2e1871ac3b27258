"""Operators that write to divided tensors, of whose results each rank keeps its part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_smddp.sharding.whole_view import WholeView
from tests.ranks import run_ranks


def write_in_ways() -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    view = WholeView()
    whole = torch.tensor([1.0, 2.0, 3.0])
    found = {}
    with view.installed():
        for way in ("init", "init that draws", "draws", "out", "item", "in place"):
            divided = distribute_tensor(whole.clone(), mesh, [Shard(0)])
            torch.manual_seed(3)
            with view.inside():
                if way == "init":
                    nn.init.constant_(divided, 7.0)
                elif way == "init that draws":
                    nn.init.trunc_normal_(divided)
                elif way == "draws":
                    divided.uniform_(2.0, 3.0)
                elif way == "out":
                    assert torch.mul(divided, whole, out=divided) is divided
                elif way == "item":
                    divided[1:] = 0.0
                else:
                    divided.add_(whole)
            found[way] = divided.full_tensor().tolist()
    return found


def test_what_is_written_reaches_each_ranks_part() -> None:
    torch.manual_seed(3)
    drawn = nn.init.trunc_normal_(torch.empty(3)).tolist()
    torch.manual_seed(3)
    expected = {"init": [7.0] * 3, "init that draws": drawn, "draws": torch.empty(3).uniform_(2.0, 3.0).tolist()}
    expected |= {"out": [1.0, 4.0, 9.0], "item": [1.0, 0.0, 0.0], "in place": [2.0, 4.0, 6.0]}
    assert run_ranks(write_in_ways, 2) == [expected] * 2
