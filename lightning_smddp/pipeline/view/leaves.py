"""The tensors that a divided module consists of, as all ranks see them: parameters, their gradients, buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.view.agreement import Agreement, Ask
from lightning_smddp.pipeline.view.tensor import GlobalTensor, Memory, View
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.stream import Spec, broadcast_tensors

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
        # A buffer that training does not change is the same on all ranks, and no leaf: it stays a plain tensor.
        for name, buffer in module.named_buffers():
            if name in ownership.buffers:
                self._add(name, buffer, (ownership.buffers[name],))

    def _add(self, name: str, tensor: Tensor, holders: tuple[int, ...]) -> None:
        leaf = Leaf(name, tensor, holders[0], holders, Memory(name))
        self.by_name[name] = leaf
        self.by_id[id(tensor)] = leaf

    def find(self, tensor: object) -> Leaf | None:
        """The leaf that ``tensor`` is; None for any other object."""
        leaf = self.by_id.get(id(tensor))
        if leaf is None or leaf.tensor is not tensor:  # an id is used again when its object is gone
            return None
        return leaf

    def show(self, leaf: Leaf) -> GlobalTensor:
        """Its stand-in, up to date: the module's tensor may have got other memory since."""
        tensor = leaf.tensor
        is_local = leaf.home == self.view.rank
        shown = leaf.shown
        if shown is None or shown.shape != tensor.shape or shown.dtype != tensor.dtype:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            with torch.inference_mode(False):  # it stays when a validation is over
                local: Tensor | None = None
                if is_local:
                    local = tensor.detach()
                shown = GlobalTensor(self.view, leaf.home, meta, local, leaf.memory)
                shown.requires_grad_(tensor.requires_grad)
            leaf.shown = shown
        elif is_local:
            assert shown.local is not None
            if shown.local.data_ptr() != tensor.data_ptr():
                shown.local = tensor.detach()
        return shown

    def in_order(self) -> list[Leaf]:
        """All of them, in an order that is the same on all ranks, as collectives need it."""
        return [self.by_name[name] for name in sorted(self.by_name)]

    def shared(self) -> list[Leaf]:
        """Those that several ranks hold, in that order."""
        return [leaf for leaf in self.in_order() if len(leaf.holders) > 1]


class ViewGradients:
    """Gradients as the view shows them: those of the stand-ins, from the first look at one to the hook's end.

    Attributes:
        loaded: whether the stand-ins have them.
    """

    def __init__(self, view: View, leaves: Leaves, agreement: Agreement) -> None:
        self.view = view
        self.leaves = leaves
        self.agreement = agreement
        self.loaded = False

    def get(self, parameter: Tensor) -> Tensor | None:
        """``parameter.grad``. The first look at any is collective: who has one is not known elsewhere."""
        self._load()
        return self.view.stand_in_for(parameter).grad

    def set(self, parameter: Tensor, value: Tensor | None) -> None:
        """What ``parameter.grad = value`` does: a ``value`` of elsewhere is brought to the rank of ``parameter``.

        Collective as :meth:`get`, and where a global tensor of another rank is fetched.
        """
        self._load()
        leaf = self.leaves.find(parameter)
        assert leaf is not None
        shown = self.leaves.show(leaf)
        # A stand-in's gradient has to be where its parameter is: autograd and the optimizer's step work there.
        is_there = isinstance(value, GlobalTensor) and value.home == leaf.home
        if value is not None and not is_there:
            value = self._moved(leaf, value)
        shown.grad = value

    def _moved(self, leaf: Leaf, value: Tensor) -> GlobalTensor:
        """``value`` on the rank of ``leaf``."""
        if isinstance(value, GlobalTensor):
            value = self.view.fetch([value])[0]
        local: Tensor | None = None
        if leaf.home == self.view.rank:
            local = value.detach().clone()
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return GlobalTensor(self.view, leaf.home, meta, local, Memory())

    def _load(self) -> None:
        """Give the stand-ins the gradients that parameters have on their homes. Collective the first time."""
        if self.loaded:
            return
        self.agreement.meet(Ask.GRADIENTS, "gradients")
        # A gradient may have other strides than its parameter; all else of it follows from the parameter.
        strides_of = self.announce()
        for name, leaf in self.leaves.by_name.items():
            tensor = leaf.tensor
            if name not in strides_of or not tensor.requires_grad:
                continue
            local = self._gradient_here(leaf)
            meta = torch.empty_strided(tensor.shape, strides_of[name], dtype=tensor.dtype, device="meta")
            shown = self.leaves.show(leaf)
            shown.grad = GlobalTensor(self.view, leaf.home, meta, local, Memory(GRADIENT + name))
        self.loaded = True

    def _gradient_here(self, leaf: Leaf) -> Tensor | None:
        """The gradient that a parameter has on its home; None on other ranks."""
        if leaf.home != self.view.rank or leaf.tensor.grad is None:
            return None
        return leaf.tensor.grad.detach()

    def announce(self) -> dict[str, list[int]]:
        """Names of the parameters that have a gradient, and its strides. Collective."""
        local = {}
        for name, leaf in self.leaves.by_name.items():
            gradient = self._gradient_here(leaf)
            if gradient is not None:
                local[name] = list(gradient.stride())
        strides_of: dict[str, list[int]] = {}
        for part in gather_json(local, self.view.group, self.view.device):
            strides_of.update(part)
        return strides_of

    def write_back(self) -> None:
        """Parameters get the gradients that their stand-ins have now. Collective if some have to be sent."""
        self._bring_home()
        for leaf in self.leaves.in_order():
            if leaf.shown is None:
                continue
            gradient = leaf.shown.grad
            if gradient is None and not self.loaded:  # nobody has looked, so None says nothing
                continue
            if self.view.rank in leaf.holders:
                self._write(leaf, gradient)
            # All holders of a tied parameter have its gradient; the view has changed it on the home alone. Versions are
            # the same on all ranks, so all of them know that it is sent.
            changed = isinstance(gradient, GlobalTensor) and gradient.memory.version > 0
            if changed and len(leaf.holders) > 1:
                self._send(leaf)

    def _send(self, leaf: Leaf) -> None:
        """Give all holders the gradient that the home of ``leaf`` has. Collective."""
        values: list[Tensor] | None = None
        if leaf.tensor.grad is not None:
            values = [leaf.tensor.grad]
        spec = Spec(tuple(leaf.tensor.shape), leaf.tensor.dtype)
        broadcast_tensors([spec], values, self.view.group, leaf.home, self.view.device)

    def _bring_home(self) -> None:
        """Gradients that a backward pass made on other ranks than their parameters'."""
        away: list[tuple[Leaf, GlobalTensor]] = []
        for leaf in self.leaves.in_order():
            if leaf.shown is None:
                continue
            gradient = leaf.shown.grad
            if isinstance(gradient, GlobalTensor) and gradient.home != leaf.home:
                away.append((leaf, gradient))
        if not away:
            return
        # All are fetched at once; `_moved` then finds the copies.
        self.view.fetch([gradient for _, gradient in away])
        for leaf, gradient in away:
            assert leaf.shown is not None
            moved = self._moved(leaf, gradient)
            moved.memory.version = 1  # it counts as changed, so that all holders of a tied parameter get it
            leaf.shown.grad = moved

    def _write(self, leaf: Leaf, gradient: Tensor | None) -> None:
        """On a holder of ``leaf``: ``.grad`` becomes ``gradient``, or room for what the home will send of it."""
        if gradient is None:
            leaf.tensor.grad = None
            return
        if not isinstance(gradient, GlobalTensor):  # every rank has made it
            leaf.tensor.grad = gradient.detach().clone()
            return
        if leaf.home != self.view.rank:
            if leaf.tensor.grad is None:
                leaf.tensor.grad = torch.zeros_like(leaf.tensor)
            return
        local = gradient.local
        assert local is not None
        before = leaf.tensor.grad
        if before is None or before.data_ptr() != local.data_ptr():
            leaf.tensor.grad = local.detach()

    def forget(self) -> None:
        """Other code may change gradients from here on."""
        self.loaded = False
        for leaf in self.leaves.by_name.values():
            if leaf.shown is not None:
                leaf.shown.grad = None
