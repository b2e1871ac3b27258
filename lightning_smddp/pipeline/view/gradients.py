"""``.grad`` of parameters of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_smddp.pipeline.view.agreement import Agreement, Ask
from lightning_smddp.pipeline.view.leaves import GRADIENT, Leaf, Leaves
from lightning_smddp.pipeline.view.tensor import GlobalTensor, Memory, View
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.stream import Spec, broadcast_tensors


class ViewGradients:
    """Gradients as the view shows them: those of the stand-ins, from the first look at one to the hook's end.

    Attributes:
        loaded: whether the stand-ins have them.
    """

    def __init__(self, view: View, leaves: Leaves, agreement: Agreement) -> None:
        self.view, self.leaves, self.agreement = view, leaves, agreement
        self.loaded = False

    def get(self, parameter: Tensor) -> Tensor | None:
        """``parameter.grad``. The first look at any is collective: who has one is not known elsewhere."""
        self._load()
        return self.view.stand_in_for(parameter).grad

    def set(self, parameter: Tensor, value: Tensor | None) -> None:
        """``parameter.grad = value``."""
        self._load()
        leaf = self.leaves.find(parameter)
        assert leaf is not None
        shown = self.leaves.show(leaf)
        if value is not None and not (isinstance(value, GlobalTensor) and value.home == leaf.home):
            value = self._moved(leaf, value)
        shown.grad = value

    def _moved(self, leaf: Leaf, value: Tensor) -> GlobalTensor:
        """``value`` on the rank of ``leaf``."""
        if isinstance(value, GlobalTensor):
            value = self.view.fetch([value])[0]
        local: Tensor | None = None
        if leaf.home == self.view.rank:
            local = value.detach().clone()
        shape = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return GlobalTensor(self.view, leaf.home, shape, local, Memory())

    def _load(self) -> None:
        if self.loaded:
            return
        _, ranks, _ = self.agreement.meet(Ask.GRADIENTS, "gradients", self.view.serial)
        present = self.announce()
        for name, leaf in self.leaves.by_name.items():
            if name in present and leaf.tensor.requires_grad:
                local: Tensor | None = None
                if leaf.home == self.view.rank and leaf.tensor.grad is not None:
                    local = leaf.tensor.grad.detach()
                shape = torch.empty_strided(leaf.tensor.shape, present[name], dtype=leaf.tensor.dtype, device="meta")
                shown = self.leaves.show(leaf)
                shown.grad = GlobalTensor(self.view, leaf.home, shape, local, Memory(GRADIENT + name))
        self.loaded = True

    def announce(self) -> dict[str, list[int]]:
        """Names of the parameters that have a gradient, and its strides. Collective."""
        local = {}
        for name, leaf in self.leaves.by_name.items():
            if leaf.home == self.view.rank and leaf.tensor.grad is not None:
                local[name] = list(leaf.tensor.grad.stride())
        gathered = gather_json(local, self.view.group, self.view.device)
        return {name: strides for part in gathered for name, strides in part.items()}

    def write_back(self) -> None:
        """Parameters get the gradients that their stand-ins have now. Collective if some have to be sent."""
        self._bring_home()
        for _, leaf in sorted(self.leaves.by_name.items()):
            if leaf.shown is None:
                continue
            gradient = leaf.shown.grad
            if gradient is None and not self.loaded:  # nobody has looked, so None says nothing
                continue
            if self.view.rank in leaf.holders:
                self._write(leaf, gradient)
            # All holders of a tied parameter have its gradient; the view has changed it on the home alone.
            changed = isinstance(gradient, GlobalTensor) and gradient.memory.version > 0
            if changed and len(leaf.holders) > 1:
                values = None
                if leaf.tensor.grad is not None:
                    values = [leaf.tensor.grad]
                spec = Spec(tuple(leaf.tensor.shape), leaf.tensor.dtype)
                broadcast_tensors([spec], values, self.view.group, leaf.home, self.view.device)

    def _bring_home(self) -> None:
        """Gradients that a backward pass made on other ranks than their parameters'."""
        away: list[tuple[Leaf, GlobalTensor]] = []
        for _, leaf in sorted(self.leaves.by_name.items()):
            if leaf.shown is None:
                continue
            gradient = leaf.shown.grad
            if isinstance(gradient, GlobalTensor) and gradient.home != leaf.home:
                away.append((leaf, gradient))
        if not away:
            return
        self.view.fetch([gradient for _, gradient in away])
        for leaf, gradient in away:
            assert leaf.shown is not None
            moved = self._moved(leaf, gradient)
            moved.memory.version = 1
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
        if leaf.tensor.grad is None or leaf.tensor.grad.data_ptr() != local.data_ptr():
            leaf.tensor.grad = local.detach()

    def forget(self) -> None:
        """Other code may change gradients from here on."""
        self.loaded = False
        for leaf in self.leaves.by_name.values():
            if leaf.shown is not None:
                leaf.shown.grad = None
