"""Weights and buffers of a whole model from its parts, and back: at the start and end of training, for checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_function
from lightning_smddp.checkpoint.stored import Stored
from lightning_smddp.communication.consistency import check_same_model
from lightning_smddp.communication.tensors import CPU, broadcast_tensors, gather_structures
from lightning_smddp.pipeline.mesh import named_tensors
from lightning_smddp.pipeline.state.meta_parameters import set_contents, swapped
from lightning_smddp.pipeline.view.view import GlobalView


def broadcast_initial(module: nn.Module, group: dist.ProcessGroup, device: torch.device = CPU) -> None:
    """Every rank starts from the first one's parameters and buffers. Collective, before a model is divided.

    Tensors on the meta device have no values and are left alone.

    Args:
        module: the complete model.
        group: all ranks, of every pipeline.
        device: where ``group``'s backend has its messages.

    Raises:
        ValueError: on every rank, if the ranks' models differ.
    """
    check_same_model(module, group)
    tensors = [tensor.detach() for tensor in named_tensors(module).values() if not tensor.is_meta]
    broadcast_tensors(tensors, group, 0, device)


def full_state_dict(view: GlobalView) -> dict[str, Any]:
    """What ``state_dict()`` of the view's module would be if it were whole, with tensors on the CPU. Collective.

    On the first rank; the others get an empty dict.

    Parameters come from their owners, buffers that training changes too; the rest (extra state, state of hooks) is
    this rank's. As with ``state_dict()``, tied names share memory, and values are not copies of what this rank
    holds on the CPU.
    """
    received: dict[str, Tensor] = {}
    for share in gather_structures(_owned(view), view.group, False, view.device):
        received |= share
    if view.rank != 0:
        return {}
    named = named_tensors(view.module)
    lent = [
        (named[name], value.detach().requires_grad_(named[name].requires_grad))
        for name, value in received.items()
        if named[name].is_meta or named[name].data_ptr() != value.data_ptr()
    ]
    # Swapped, not copied: `state_dict` then returns the received tensors themselves.
    with swapped(lent):
        state: dict[str, Any] = view.module.state_dict()
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = value.cpu()  # what was received is there: tied names still share memory
    return state


def partial_state_dict(view: GlobalView) -> dict[str, Any]:
    """What this rank gives to :func:`full_state_dict`: nothing is copied, moved or sent.

    What no rank owns (buffers that training leaves alone, what hooks add) is in the part of every rank that has it.
    """
    # `keep_vars` gives the module's own tensor objects: they tell that a tied name is another one's, and whose it is.
    named, here = named_tensors(view.module), (view.rank, None)
    others = {id(tensor) for name, tensor in named.items() if view.ownership.owner(name) not in here}
    part = {}
    for key, value in view.module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            if view.rank == 0:
                part[key] = value
        elif not value.is_meta and id(value) not in others:
            part[key] = value.detach()
    return part


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """``module.load_state_dict(state, strict)`` on a divided module: what this rank holds is copied.

    Missing and unexpected keys and wrong shapes are found for everything, as in the whole module. Not collective.
    """
    if isinstance(state, Stored):  # of what other ranks hold it needs the shapes alone
        own = module.state_dict(keep_vars=True)
        absent = [key for key in state if isinstance(own.get(key), Tensor) and own[key].is_meta]
        held = [key for key in state if key not in set(absent)]
        state = {**state.read(held), **state.read(absent, "meta")}
    with warnings.catch_warnings(), without_torch_function():
        # Copying into a parameter on the meta device does nothing, of which torch warns: these are of other ranks.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*", category=UserWarning)
        return module.load_state_dict(state, strict=strict)


def unshard(view: GlobalView, to: torch.device | None = None) -> None:
    """Undo :func:`release`: every rank holds every parameter again, as the same objects. Collective.

    Args:
        view: of the module.
        to: where parameters of other ranks go, by one rank's share after the other; None: to the view's device.
    """
    named = named_tensors(view.module)
    for share in gather_structures(_owned(view), view.group, True, view.device):
        for name, value in share.items():
            # Every rank has each buffer, but its owner alone has what training has made of it.
            tensor = named[name]
            if tensor.is_meta:
                set_contents(tensor, value.to(to or view.device))
            elif view.ownership.owner(name) != view.rank:
                set_contents(tensor, value.to(tensor.device))


def _owned(view: GlobalView) -> dict[str, Tensor]:
    """The tensors that this rank owns. Raises ``ValueError``, on every rank, if parameters came after the division."""
    owner = view.ownership.owner
    late = [name for name, _ in view.module.named_parameters() if owner(name) is None]
    if late:
        raise ValueError(
            f"Parameters {late} came after the pipeline was divided: each rank has its own values. Create all layers "
            "in `__init__` or `configure_model`."
        )
    return {name: tensor for name, tensor in named_tensors(view.module).items() if owner(name) == view.rank}
