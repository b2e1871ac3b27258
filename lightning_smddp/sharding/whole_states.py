"""States whose tensors are divided among ranks, as those of one process, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_smddp._compat.fsdp import call_as_is, divided_like
from lightning_smddp.pytree import map_tensors


def whole(value: Tensor) -> Tensor:
    """All of a tensor, on the CPU. Collective for one that is divided."""
    if isinstance(value, DTensor):
        value = all_of(value)
    return value.detach().cpu()


def all_of(value: DTensor) -> Tensor:
    """All of a tensor that is divided in its first dimension, as FSDP2 does it, on the mesh's device. Collective.

    ``full_tensor`` needs the device's own backend in a form that not every one has, and shares where it is.
    """
    mesh = value.device_mesh
    local: Tensor = call_as_is(DTensor.to_local, (value.detach(),), {})
    # The mesh's last dimension has the ranks that divide one copy. Each sends equally many rows, as the collective has
    # it: behind its own there are zeros, which come last in what is gathered.
    last = mesh.ndim - 1
    rows_of_rank = _rows_of_rank(value.size(0), mesh)
    shape_of_row = value.shape[1:]
    own = local.new_zeros((rows_of_rank, *shape_of_row), device=mesh.device_type)
    own[: local.size(0)].copy_(local)
    found = own.new_empty((mesh.size(last) * rows_of_rank, *shape_of_row))
    dist.all_gather_single(found.view(-1), own.view(-1), mesh.get_group(last))
    return found[: value.size(0)]


def _rows_of_rank(rows: int, mesh: DeviceMesh) -> int:
    """Of so many rows each rank's, as ``torch.chunk`` divides them: the last ranks may have less, or nothing."""
    # Of 7 rows four ranks have 2, 2, 2 and 1; of 3 rows 1, 1, 1 and none.
    return math.ceil(rows / mesh.size(mesh.ndim - 1))


Keeps = Callable[[int], bool]
"""Whether this rank keeps the tensor of a number, or what is no tensor (0): what is gathered is in memory once."""


def gathered_model(state: Mapping[str, Any], keeps: Keeps) -> dict[str, Any]:
    """What this rank keeps of a ``state_dict(keep_vars=True)``, with whole tensors on the CPU. Collective.

    Tied weights are one tensor again.
    """
    divided = {id(value): value for value in state.values() if isinstance(value, DTensor)}
    wholes = _gathered(divided, keeps)
    kept: dict[str, Any] = {}
    for name, value in state.items():
        if id(value) in wholes:
            kept[name] = wholes[id(value)]
        elif id(value) not in divided and keeps(0):  # buffers are each rank's own: the first one's count, as under DDP
            kept[name] = whole(value) if isinstance(value, Tensor) else value
    return kept


def gathered_optimizer(state: Mapping[str, Any], keeps: Keeps) -> dict[str, Any]:
    """What this rank keeps of an optimizer's ``state_dict()``, with whole tensors on the CPU. Collective."""
    return {**state, "state": _gathered(state["state"], keeps)}


def _gathered(values: Mapping[Any, Any], keeps: Keeps) -> dict[Any, Any]:
    # All ranks gather all of them, in the same order, and drop at once what others keep.
    kept = {}
    for number, (key, value) in enumerate(values.items()):
        found = map_tensors(whole, value)
        if keeps(number):
            kept[key] = found
    return kept


def own_part(value: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a whole tensor that all ranks have, copied, divided and placed as ``like``. Not collective.

    Args:
        value: of the shape of ``like``.
        like: how it is divided.
    """
    mesh = like.device_mesh
    rows = _rows_of_rank(value.size(0), mesh)
    low = rows * mesh.get_local_rank(mesh.ndim - 1)
    local = value.detach()[low : low + rows].to(like.to_local().device, copy=True)
    return divided_like(local, like)


def divided_model_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A whole model's ``state_dict`` for a ``module`` whose parameters are divided: with this rank's parts of them."""
    own = module.state_dict(keep_vars=True)
    found = dict(state)
    for name, value in state.items():
        like = own.get(name)
        # Of another shape, `load_state_dict` says what is wrong.
        if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
            found[name] = own_part(value, like).to(like.dtype)
    return found


def divided_optimizer_state(parameters: Sequence[Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """A whole optimizer's ``state_dict`` for one of divided ``parameters``, in the order of its groups."""
    states = dict(state["state"])
    for number, values in states.items():
        like = parameters[number] if isinstance(number, int) else None
        if isinstance(like, DTensor) and isinstance(values, Mapping):
            states[number] = {key: _divided(value, like) for key, value in values.items()}
    return {**state, "state": states}


def _divided(value: Any, like: DTensor) -> Any:
    if isinstance(value, Tensor):  # of another shape, optimizers have it for whole rows or columns
        return own_part(value, like) if value.shape == like.shape else value.clone()
    return value
