"""The tensors that a divided module consists of, as all ranks see them: parameters, their gradients, buffers."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.view.global_tensor import GlobalStorage, GlobalTensor, TensorView, key_of
from lightning_smddp.pipeline.view.rendezvous import Rendezvous, Request
from lightning_smddp.wire.stream import Spec, broadcast_tensors

GRADIENT = "grad:"  # before the name of a parameter: its gradient


class View(TensorView, Protocol):
    """What its parts and operations ask of the :class:`~.view.GlobalView`."""

    group: dist.ProcessGroup
    rank: int
    is_used: bool
    tensors: ModuleTensors
    gradients: ViewGradients
    rendezvous: Rendezvous

    def find(self, tensor: object) -> ModuleTensor | None: ...  # noqa: D102
    def as_global(self, structure: Any) -> Any: ...  # noqa: D102
    def own_object(self, tensor: GlobalTensor) -> Tensor: ...  # noqa: D102
    def fetch(self, tensors: Sequence[GlobalTensor]) -> list[Tensor]: ...  # noqa: D102
    def of_owner(self, value: Any, owner: int, what: str, key: int) -> Any: ...  # noqa: D102
    def set_data(self, target: Tensor, value: Tensor) -> None: ...  # noqa: D102
    def note_write(self, tensor: GlobalTensor, key: int) -> None: ...  # noqa: D102


@dataclass
class ModuleTensor:
    """A parameter or buffer of the module.

    Attributes:
        name: its first one.
        tensor: what the module holds under that name: the values, or a tensor on the meta device.
        owner: the rank whose values count.
        ranks: all that have its values.
        global_tensor: what user code gets in its place; None before that has asked for it.
    """

    name: str
    tensor: Tensor
    owner: int
    ranks: tuple[int, ...]
    global_tensor: GlobalTensor | None = None


class ModuleTensors:
    """All of a module's, by object and by name.

    Args:
        module: divided.
        ownership: who holds what.
        view: of the module.
    """

    def __init__(self, module: nn.Module, ownership: Ownership, view: View) -> None:
        self.view = view
        self.by_name: dict[str, ModuleTensor] = {}
        self.by_id: dict[int, ModuleTensor] = {}
        self.buffers = frozenset(ownership.buffers)
        for name, parameter in module.named_parameters():
            self._add(name, parameter, ownership.parameters[name])
        # A buffer that training does not change is the same on all ranks, and not here: it stays a plain tensor.
        for name, buffer in module.named_buffers():
            if name in ownership.buffers:
                self._add(name, buffer, (ownership.buffers[name],))

    def _add(self, name: str, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self.by_id[id(tensor)] = self.by_name[name] = ModuleTensor(name, tensor, ranks[0], ranks)

    def find(self, tensor: object) -> ModuleTensor | None:
        """The one that ``tensor`` is; None for any other object."""
        found = self.by_id.get(id(tensor))
        if found is None or found.tensor is not tensor:  # an id is used again when its object is gone
            return None
        return found

    def as_global(self, found: ModuleTensor) -> GlobalTensor:
        """Its global tensor, up to date: the module's own may have got other memory since."""
        self.view.is_used = True
        tensor = found.tensor
        is_here = found.owner == self.view.rank
        present = found.global_tensor
        if present is None or present.shape != tensor.shape or present.dtype != tensor.dtype:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            with torch.inference_mode(False):  # it stays when a validation is over
                local = tensor.detach() if is_here else None
                present = GlobalTensor(
                    self.view, found.owner, meta, local, GlobalStorage(key_of(found.name), found.name)
                )
                present.requires_grad_(tensor.requires_grad)
            found.global_tensor = present
        elif is_here:
            assert present.local is not None
            if present.local.data_ptr() != tensor.data_ptr():
                present.local = tensor.detach()
        return present

    def in_order(self) -> list[ModuleTensor]:
        """Those that user code has asked for, in an order that is the same on all ranks, as collectives need it."""
        return [found for _, found in sorted(self.by_name.items()) if found.global_tensor is not None]

    def share(self, changed: Set[str | None]) -> None:
        """Ranks that hold a parameter of these names get the owner's values. Collective if there is any."""
        for found in self.in_order():
            if found.name in changed and len(found.ranks) > 1:
                self.send(found, found.tensor.detach())

    def send(self, found: ModuleTensor, values: Tensor | None) -> None:
        """Write the owner's ``values`` into those of all ranks that hold ``found``. Collective."""
        spec = Spec.of(found.tensor)
        mine = [values] if values is not None and self.view.rank in found.ranks else None
        broadcast_tensors([spec], mine, self.view.group, found.owner, self.view.device)


class ViewGradients:
    """Gradients as the view shows them: those of the global tensors, from the first look at one to the hook's end.

    Attributes:
        loaded: whether the global tensors have them.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.loaded = False

    def get(self, parameter: ModuleTensor) -> Tensor | None:
        """Its ``.grad``. The first look at any is collective: who has one is not known elsewhere."""
        self._load()
        return self.view.tensors.as_global(parameter).grad

    def set(self, parameter: ModuleTensor, value: Tensor | None) -> None:
        """What ``parameter.grad = value`` does: a ``value`` of elsewhere is brought to the rank of ``parameter``.

        Collective as :meth:`get`, and where a global tensor of another rank is fetched.
        """
        self._load()
        # A global tensor's gradient has to be where that is: autograd and the optimizer's step work there.
        if value is not None:
            value = self._moved(parameter, value)
        self.view.tensors.as_global(parameter).grad = value
        key = value.global_storage.key if isinstance(value, GlobalTensor) else 0
        self.view.rendezvous.note_write(GRADIENT + parameter.name, key)

    def _moved(self, parameter: ModuleTensor, value: Tensor) -> GlobalTensor:
        """``value`` on the owner of ``parameter``."""
        storage = GlobalStorage(0)
        if isinstance(value, GlobalTensor):
            if value.owner == parameter.owner:
                return value
            storage.key = value.global_storage.key
            value = self.view.fetch([value])[0]
        local = value.detach().clone() if parameter.owner == self.view.rank else None
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return GlobalTensor(self.view, parameter.owner, meta, local, storage)

    def _load(self) -> None:
        """Give the global tensors the gradients that parameters have on their owners. Collective the first time."""
        if self.loaded:
            return
        self.view.rendezvous.meet(Request.GRADIENTS, "gradients")
        # A gradient may have other strides than its parameter; all else of it follows from the parameter.
        for name, strides in self.announce().items():
            found = self.view.tensors.by_name[name]
            if not found.tensor.requires_grad:
                continue
            meta = torch.empty_strided(found.tensor.shape, strides, dtype=found.tensor.dtype, device="meta")
            storage = GlobalStorage(key_of(GRADIENT, name), GRADIENT + name)
            gradient = GlobalTensor(self.view, found.owner, meta, self.here(found), storage)
            self.view.tensors.as_global(found).grad = gradient
        self.loaded = True

    def here(self, parameter: ModuleTensor) -> Tensor | None:
        """The gradient that a parameter has on its owner; None on other ranks."""
        if parameter.owner != self.view.rank or parameter.tensor.grad is None:
            return None
        return parameter.tensor.grad.detach()

    def announce(self) -> dict[str, tuple[int, ...]]:
        """Names of the parameters that have a gradient, and its strides. Collective."""
        local = {}
        for name, found in self.view.tensors.by_name.items():
            gradient = self.here(found)
            if gradient is not None:
                local[name] = tuple(gradient.stride())
        strides_of: dict[str, tuple[int, ...]] = {}
        for part in self.view.rendezvous.gather(local):
            strides_of.update(part)
        return strides_of

    def write_back(self, changed: Set[str | None]) -> None:
        """Parameters get the gradients that their global tensors have now. Collective if some have to be sent.

        Args:
            changed: names of gradients; None stands for new ones.
        """
        for found in self.view.tensors.in_order():
            assert found.global_tensor is not None
            gradient = found.global_tensor.grad
            if gradient is None and not self.loaded:  # nobody has looked, so None says nothing
                continue
            if gradient is not None:  # a backward pass may have made it on another rank
                gradient = self._moved(found, gradient)
            if self.view.rank in found.ranks:
                self._write(found, gradient)
            # All ranks that hold a tied parameter have its gradient; the view has changed it on the owner alone.
            if gradient is None or len(found.ranks) == 1:
                continue
            if not changed.isdisjoint((gradient.global_storage.name, GRADIENT + found.name)):
                self.view.tensors.send(found, found.tensor.grad)

    def _write(self, found: ModuleTensor, gradient: GlobalTensor | None) -> None:
        """Where ``found`` is: ``.grad`` becomes ``gradient``, or room for what the owner will send of it."""
        tensor = found.tensor
        if gradient is None:
            tensor.grad = None
        elif gradient.local is None:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        elif tensor.grad is None or tensor.grad.data_ptr() != gradient.local.data_ptr():
            tensor.grad = gradient.local.detach()

    def forget(self) -> None:
        """Other code may change gradients from here on."""
        self.loaded = False
        for found in self.view.tensors.by_name.values():
            if found.global_tensor is not None:
                found.global_tensor.grad = None
