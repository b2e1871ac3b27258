"""From the whole model to its parts and back: memory of other ranks' parameters, checkpoints, the end of training."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import forget_hooks, swap_contents
from lightning_smddp.pipeline.partition.ownership import Ownership, named_tensors
from lightning_smddp.pipeline.state.absent import AbsentParameter, mark_absent, mark_present, may_be_absent
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.stream import CPU, Spec, broadcast_tensors, gather_tensors, gathered_shares


def broadcast_initial(module: nn.Module, group: dist.ProcessGroup, source: int = 0, device: torch.device = CPU) -> None:
    """Every rank starts from rank ``source``'s parameters and buffers. Collective, before :func:`release`.

    Tensors on the meta device have no values and are left alone.

    Args:
        module: the complete model.
        group: all ranks, of every pipeline.
        source: rank in ``group``.
        device: where ``group``'s backend has its messages.

    Raises:
        ValueError: on every rank, if the ranks' models differ.
    """
    named = named_tensors(module)
    facts = [[name, *Spec.of(tensor).to_json(), tensor.is_meta] for name, tensor in named.items()]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if len(set(gather_json(digest, group, device))) > 1:
        gathered = gather_json(facts, group, device)
        other = next(rank for rank, remote in enumerate(gathered) if remote != gathered[source])
        different = [fact for fact in gathered[other] if fact not in gathered[source]]
        different = different or [fact for fact in gathered[source] if fact not in gathered[other]]
        raise ValueError(
            f"The models of rank {source} and rank {other} differ, first in {different[:1]} (name, shape, dtype, on "
            "the meta device). Build the same model on every rank: nothing in it may depend on the rank."
        )
    tensors = [tensor.detach() for tensor in named.values() if not tensor.is_meta]
    broadcast_tensors([Spec.of(tensor) for tensor in tensors], tensors, group, source, device)


def release(module: nn.Module, ownership: Ownership, rank: int) -> None:
    """Free the memory of the parameters that ``rank`` does not hold: they become meta tensors.

    They stay the same objects under all their names and in the user's own lists, with shape, dtype and
    ``requires_grad``; their gradients and the hooks registered on them go. Buffers stay. Memory that something else
    still refers to (a view, a live autograd graph) is freed when that goes. Repeating it changes nothing.

    Raises:
        ValueError: the module has other parameters than were placed.
    """
    ownership.check(module)
    for name, parameter in module.named_parameters():
        if not ownership.is_mine(name, rank):
            set_contents(parameter, torch.empty_like(parameter, device="meta"))
            mark_absent(parameter, name, ownership.owner(name))


def set_contents(tensor: Tensor, value: Tensor) -> None:
    """Give ``tensor`` the memory of ``value``, on any device; it stays the same object, without gradient and hooks."""
    swap_contents(tensor, value.detach().requires_grad_(tensor.requires_grad))
    forget_hooks(tensor)
    if isinstance(tensor, AbsentParameter) and not tensor.is_meta:
        mark_present(tensor)


def full_state_dict(
    module: nn.Module,
    ownership: Ownership,
    group: dist.ProcessGroup,
    to_all: bool,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """What ``module.state_dict()`` would be if the model were whole, with tensors on the CPU. Collective.

    Parameters come from their owners, buffers that training changes too; the rest (extra state, state of hooks) is
    this rank's. As with ``state_dict()``, tied names share memory, and values are not copies of what this rank
    holds on the CPU.

    Args:
        module: divided by :func:`release`.
        ownership: who holds what.
        group: the ranks of this pipeline.
        to_all: False leaves all ranks but the first with an empty dict.
        device: where ``group``'s backend has its messages.
    """
    received = gather_tensors(_spoken_for(module, ownership, group.rank()), group, to_all, device)
    if not to_all and group.rank() != 0:
        return {}
    with _lent(module, received):
        state: dict[str, Any] = module.state_dict()
    return _on_cpu(state)


def partial_state_dict(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, Any]:
    """What ``rank`` gives to :func:`full_state_dict`: nothing is copied, moved or sent.

    What no rank owns (buffers that training leaves alone, what hooks add) is in the part of every rank that has it.
    """
    names = {id(tensor): name for name, tensor in named_tensors(module).items()}
    owned = {*ownership.parameters, *ownership.buffers}
    part = {}
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            name = names.get(id(value))
            if value.is_meta or (name in owned and ownership.owner(name) != rank):
                continue
            value = value.detach()
        elif rank != 0:
            continue
        part[key] = value
    return part


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """``module.load_state_dict(state, strict)`` on a divided module: what this rank holds is copied.

    Missing and unexpected keys and wrong shapes are found for everything, as in the whole module. Not collective.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*", category=UserWarning)
        with may_be_absent():
            return module.load_state_dict(state, strict=strict)


def gather_full(
    module: nn.Module,
    ownership: Ownership,
    group: dist.ProcessGroup,
    device: torch.device = CPU,
    to: torch.device | None = None,
) -> None:
    """Undo :func:`release`: every rank holds every parameter again, as the same objects. Collective.

    Args:
        module: divided by :func:`release`.
        ownership: who holds what.
        group: the ranks of this pipeline.
        device: where ``group``'s backend has its messages.
        to: where parameters of other ranks go, by one rank's share after the other; ``device`` if None.
    """
    named, rank = named_tensors(module), group.rank()
    for share in gathered_shares(_spoken_for(module, ownership, rank), group, True, device):
        for name, value in share.items():
            if named[name].is_meta:
                set_contents(named[name], value.to(device if to is None else to))
            elif name in ownership.buffers and ownership.buffers[name] != rank:
                set_contents(named[name], value.to(named[name].device))


def _spoken_for(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, Tensor]:
    """The tensors that ``rank`` owns."""
    ownership.check(module)
    named = named_tensors(module)
    names = [*ownership.parameters, *(name for name in ownership.buffers if name in named)]
    return {name: named[name] for name in names if ownership.owner(name) == rank}


@contextmanager
def _lent(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it ``module``'s tensors of these names hold ``values``, where they are not theirs already."""
    named = named_tensors(module)
    changed = []
    try:
        for name, value in values.items():
            tensor = named[name]
            if tensor.is_meta or tensor.data_ptr() != value.data_ptr():
                other = value.detach().requires_grad_(tensor.requires_grad)
                swap_contents(tensor, other)
                changed.append((tensor, other))
        yield
    finally:
        for tensor, other in changed:
            swap_contents(tensor, other)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` itself with its tensors on the CPU; those that shared memory still do."""
    moved: dict[tuple[Any, ...], Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            memory = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if memory not in moved:
                moved[memory] = value.cpu()
            state[key] = moved[memory]
    return state
