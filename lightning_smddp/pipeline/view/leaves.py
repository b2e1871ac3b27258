"""The tensors that a divided module consists of, as all ranks see them: parameters, their gradients, buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.partition.ownership import Ownership
from lightning_smddp.pipeline.view.tensor import GlobalTensor, Memory, View

GRADIENT = "grad:"  # before the name of a parameter: its gradient


@dataclass
class Leaf:
    """A parameter or buffer of the module.

    Attributes:
        name: its first one.
        tensor: what the module holds under that name: the values, or a tensor on the meta device.
        home: the rank that speaks for it.
        holders: all ranks that have its values.
        memory: what its stand-ins share.
        shown: the stand-in; None before it was asked for.
    """

    name: str
    tensor: Tensor
    home: int
    holders: tuple[int, ...]
    memory: Memory
    shown: GlobalTensor | None = None


class Leaves:
    """All of a module's, by object and by name.

    Args:
        module: divided.
        ownership: who holds what.
        view: makes the stand-ins.
    """

    def __init__(self, module: nn.Module, ownership: Ownership, view: View) -> None:
        self.view = view
        self.by_name: dict[str, Leaf] = {}
        self.by_id: dict[int, Leaf] = {}
        self.buffers = frozenset(ownership.buffers)
        for name, parameter in module.named_parameters():
            self._add(name, parameter, ownership.parameters[name])
        for name, buffer in module.named_buffers():
            if name in ownership.buffers:
                self._add(name, buffer, (ownership.buffers[name],))

    def _add(self, name: str, tensor: Tensor, holders: tuple[int, ...]) -> None:
        leaf = Leaf(name, tensor, holders[0], holders, Memory(name))
        self.by_name[name] = self.by_id[id(tensor)] = leaf

    def find(self, tensor: object) -> Leaf | None:
        """The leaf that ``tensor`` is; None for any other object."""
        leaf = self.by_id.get(id(tensor))
        if leaf is None or leaf.tensor is not tensor:  # an id is used again when its object is gone
            return None
        return leaf

    def show(self, leaf: Leaf) -> GlobalTensor:
        """Its stand-in, up to date: the module's tensor may have got other memory since."""
        tensor, is_local = leaf.tensor, leaf.home == self.view.rank
        shown = leaf.shown
        if shown is None or shown.shape != tensor.shape or shown.dtype != tensor.dtype:
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            with torch.inference_mode(False):  # it stays when a validation is over
                local: Tensor | None = None
                if is_local:
                    local = tensor.detach()
                shown = GlobalTensor(self.view, leaf.home, shape, local, leaf.memory)
                shown.requires_grad_(tensor.requires_grad)
            leaf.shown = shown
        elif is_local:
            assert shown.local is not None
            if shown.local.data_ptr() != tensor.data_ptr():
                shown.local = tensor.detach()
        return shown

    def shared(self) -> list[Leaf]:
        """Those that several ranks hold, in an order that is the same everywhere."""
        return [leaf for _, leaf in sorted(self.by_name.items()) if len(leaf.holders) > 1]
