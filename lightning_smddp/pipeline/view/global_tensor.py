"""Tensors whose values are on one rank of a pipeline: those of a module, as all ranks see them, and their results."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import disabled_torch_function, wrapper_subclass
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.ops import user_location
from lightning_smddp.pipeline.mesh import named_tensors
from lightning_smddp.pytree import leaves, map_leaves

View: TypeAlias = Any
"""The :class:`~.view.GlobalView`, which is made of what is here."""

GRADIENT = "grad:"  # before the name of a parameter: its gradient

Extent: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
"""What a tensor covers of its memory: shape, strides, offset, dtype."""


class GlobalViewError(RuntimeError):
    """A tensor of another rank was used where its rank does not take part, or ranks did different things."""


class OutsideViewError(GlobalViewError, SplitError):
    """What a hook has kept was used elsewhere."""


class Call(NamedTuple):
    """An operator with its arguments: global tensors and others, also in tuples, lists and dicts."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> list[Any]:
        """The arguments, with those in containers each for itself."""
        return leaves((self.args, self.kwargs))

    def run(self, change: Callable[[Any], Any]) -> Any:
        """The result, with what ``change`` makes of each of the :meth:`leaves` in its place."""
        args, kwargs = map_leaves(change, (self.args, self.kwargs))
        return self.function(*args, **kwargs)


class GlobalStorage:
    """What a global tensor and its views share.

    Attributes:
        key: tells how the values were made; the same on all ranks that have run the same code.
        name: under which the module knows it, with ``grad:`` before that of a gradient; else None.
    """

    def __init__(self, key: int, name: str | None = None) -> None:
        self.key = key
        self.name = name


# What there is of one tensor:
#     on its owner      meta (shape, strides), local (the values)
#     on other ranks    meta, and a copy in the view once its values were fetched
class GlobalTensor(Tensor):
    """The same tensor on every rank of a pipeline; one of them, its *owner*, has the values.

    It has the shape, dtype, strides and the device of the rank; autograd works on it. Operations on it need the view
    that made it to be entered on all ranks.

    Attributes:
        global_view: whose it is.
        owner: rank in the pipeline.
        local: the values, on the owner; None elsewhere.
        meta: a tensor on the meta device that shares memory with those of its views.
        global_storage: shared with its views.
    """

    global_view: View
    owner: int
    local: Tensor | None
    meta: Tensor
    global_storage: GlobalStorage

    @staticmethod
    def __new__(
        cls, view: View, owner: int, meta: Tensor, local: Tensor | None, storage: GlobalStorage
    ) -> GlobalTensor:
        """A tensor like ``meta`` with the values ``local``, which ranks other than ``owner`` do not have."""
        # Ranks without values go by the strides of the meta tensor, which a kernel need not have kept to.
        if local is not None and local.stride() != meta.stride():
            local = torch.empty_like(meta, device=local.device).copy_(local)
        self: GlobalTensor = wrapper_subclass(
            cls, meta.shape, meta.stride(), int(meta.storage_offset()), dtype=meta.dtype, device=view.device
        )
        self.global_view = view
        self.owner = owner
        self.local = local
        self.meta = meta
        self.global_storage = storage
        view.remember(self)
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called for each operator that gets one, also in backward passes."""
        call = Call(function, tuple(args), dict(kwargs or {}))
        tensor = next(leaf for leaf in call.leaves() if isinstance(leaf, GlobalTensor))
        view = tensor.global_view
        if view.is_entered:
            return view.run(call)
        if function is torch.ops.aten.detach.default:  # autograd's own, which reads nothing
            return GlobalTensor(view, tensor.owner, tensor.meta.detach(), tensor.local, tensor.global_storage)
        raise OutsideViewError(
            f"{function} at {user_location()} uses {tensor.describe()}, whose values are on rank {tensor.owner} of the "
            "pipeline. Other ranks' tensors can be used in hooks and callbacks, where all ranks run the same code, but "
            "not here. Do it in a hook such as `on_train_batch_end`, or keep it in a buffer, which hooks may change "
            "in place and steps may use."
        )

    @property
    def extent(self) -> Extent:
        """What it covers of its memory."""
        meta = self.meta
        return meta.shape, meta.stride(), int(meta.storage_offset()), meta.dtype

    def describe(self) -> str:
        """The tensor as error messages name it: its parameter's name, if it has one, and its shape."""
        shape = f"a tensor of shape {tuple(self.shape)}"
        name = self.global_storage.name
        return shape if name is None else f"{name!r}, {shape}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with memory of its own, where this one's values are."""
        if id(self) not in memo:
            copy: Any = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                copy = nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]


def key_of(*facts: Any) -> int:
    """A digest that is the same in all processes."""
    return zlib.crc32(repr(facts).encode())


@dataclass
class ModuleTensor:
    """A parameter or buffer of the module.

    Attributes:
        name: its first one.
        tensor: what the module holds under that name: the values, or a tensor on the meta device.
        ranks: all that have its values. Those of the first one, its owner, count.
        global_tensor: what user code gets in its place.
    """

    name: str
    tensor: Tensor
    ranks: tuple[int, ...]
    global_tensor: GlobalTensor

    @property
    def owner(self) -> int:
        """The rank whose values count."""
        return self.ranks[0]


class ModuleTensors:
    """All of a module's, and the gradients that user code sees: from the first look at one to the hook's end.

    Attributes:
        gradients_known: whether the global tensors have the gradients.

    Args:
        view: of the module. A buffer that nobody owns is the same on all ranks: it stays a plain tensor.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.gradients_known = False
        self.by_name: dict[str, ModuleTensor] = {}
        buffers = {name: (owner,) for name, owner in view.ownership.buffers.items()}
        holders = {**view.ownership.parameters, **buffers}
        with torch.inference_mode(False):  # they stay when a validation is over
            for name, tensor in named_tensors(view.module).items():
                if name in holders:
                    ranks = holders[name]
                    # Its own strides, also with holes: views of it have to share its memory.
                    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                    self.by_name[name] = ModuleTensor(name, tensor, ranks, self._named(meta, ranks[0], name))
        self._by_id = {id(found.tensor): found for found in self.by_name.values()}

    def find(self, tensor: object) -> ModuleTensor | None:
        """The one that ``tensor`` is; None for any other object."""
        found = self._by_id.get(id(tensor))
        # An id is used again when its object is gone.
        return found if found is not None and found.tensor is tensor else None

    def as_global(self, found: ModuleTensor) -> GlobalTensor:
        """Its global tensor, up to date: the module's own may have got other memory, or another flag, since."""
        present, tensor = found.global_tensor, found.tensor
        if present.requires_grad != tensor.requires_grad:
            present.requires_grad_(tensor.requires_grad)
        if found.owner == self.view.rank:
            present.local = tensor.detach()
        return present

    def _named(self, meta: Tensor, owner: int, name: str, local: Tensor | None = None) -> GlobalTensor:
        """A global tensor laid out as ``meta``, that the module knows."""
        return GlobalTensor(self.view, owner, meta, local, GlobalStorage(key_of(name), name))

    def named(self, name: str) -> GlobalTensor:
        """A parameter or buffer, or a gradient as it is on its owner now."""
        found = self.by_name[name.removeprefix(GRADIENT)]
        if name == found.name:
            return self.as_global(found)
        local = None
        if found.owner == self.view.rank and found.tensor.grad is not None:
            local = found.tensor.grad.detach()
        return self._named(torch.empty_like(found.tensor, device="meta"), found.owner, name, local)

    def at_owner(self, found: ModuleTensor, value: Tensor) -> Tensor | None:
        """``value`` on the owner of ``found``; None elsewhere. Collective where it has to be moved."""
        if isinstance(value, GlobalTensor):
            if value.owner == found.owner:
                return value.local
            (value,) = self.view.fetch([value]).values()
        if found.owner != self.view.rank:
            return None
        return torch.empty_like(found.tensor).copy_(value.detach())

    # ---- gradients: autograd and the optimizer's step work where the parameter is ----

    def load_gradients(self) -> None:
        """Give the global tensors the gradients that parameters have on their owners. Collective the first time."""
        if self.gradients_known:
            return
        self.gradients_known = True
        for name in self.view.names_with_gradient():
            self.as_global(self.by_name[name]).grad = self.named(GRADIENT + name)

    def with_gradient(self) -> list[str]:
        """Names of the parameters that this rank owns and that have one."""
        own = [found for found in self.by_name.values() if found.owner == self.view.rank]
        return [found.name for found in own if found.tensor.grad is not None]

    # ---- the hook's end ----

    def write_back(self, changed: Set[str]) -> None:
        """Ranks that hold a tied parameter get its owner's values, and parameters get the gradients made in the hook.

        Collective if something has to be sent.

        Args:
            changed: names of tensors and gradients.
        """
        if not changed and not self.gradients_known:
            return
        for name, found in sorted(self.by_name.items()):  # alike on all ranks, as collectives need it
            is_tied = len(found.ranks) > 1
            if is_tied and name in changed:
                self._send(found, found.tensor.detach())
            if not self.gradients_known:
                continue
            gradient = found.global_tensor.grad
            own = GRADIENT + name
            is_new = own in changed or not isinstance(gradient, GlobalTensor) or gradient.global_storage.name != own
            self._set_gradient(found, gradient)
            # All ranks that hold a tied parameter have its gradient; the view has changed it on the owner alone.
            if is_tied and is_new and gradient is not None:
                self._send(found, found.tensor.grad)

    def _set_gradient(self, found: ModuleTensor, gradient: Tensor | None) -> None:
        """The owner's ``.grad`` becomes ``gradient``, that of others who hold a tied parameter room for it."""
        tensor = found.tensor
        if gradient is None:
            tensor.grad = None
            return
        value = self.at_owner(found, gradient)  # a backward pass may have made it on another rank
        if value is not None:
            tensor.grad = value
        elif tensor.grad is None and self.view.rank in found.ranks:
            tensor.grad = torch.zeros_like(tensor)

    def _send(self, found: ModuleTensor, values: Tensor | None) -> None:
        """Write the owner's ``values`` into those of all ranks that hold ``found``. Collective."""
        if values is None or self.view.rank not in found.ranks:
            values = torch.empty_like(found.tensor, device="meta")
        self.view.broadcast([(found.owner, values)])

    def forget_gradients(self) -> None:
        """Other code may change gradients from here on."""
        if self.gradients_known:
            self.gradients_known = False
            for found in self.by_name.values():
                found.global_tensor.grad = None
