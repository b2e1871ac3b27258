"""A tensor whose values are on one rank of a pipeline."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import disabled_torch_function, wrapper_subclass
from lightning_smddp.pipeline.capture.ops import user_location

Extent: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, str]
"""What a tensor shows of its memory: shape, strides, offset, dtype."""


class GlobalViewError(RuntimeError):
    """A tensor of another rank was used where its rank does not take part, or ranks did different things."""


class OutsideViewError(GlobalViewError):
    """What a hook has kept was used elsewhere."""


class Call(NamedTuple):
    """An operator with its arguments: global tensors and others, also in tuples, lists and dicts."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> list[Any]:
        """The arguments, with those in containers each for itself."""
        found: list[Any] = []
        map_arguments(found.append, (self.args, self.kwargs))
        return found

    def global_tensors(self) -> list[GlobalTensor]:
        """Those among the arguments, in order."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, GlobalTensor)]

    def run(self, change: Callable[[Any], Any]) -> Any:
        """The result, with what ``change`` makes of each of the :meth:`leaves` in its place."""
        return self.function(*map_arguments(change, self.args), **map_arguments(change, self.kwargs))

    def key(self, name: str) -> int:
        """What tells its result from others: alike on ranks that have run the same code."""
        facts: list[Any] = [name]
        for leaf in self.leaves():
            if isinstance(leaf, GlobalTensor):
                facts += leaf.global_storage.key, leaf.extent
            elif isinstance(leaf, Tensor):
                facts.append(tuple(leaf.shape))
            elif isinstance(leaf, (bool, int, float, complex, str)):
                facts.append(leaf)
        return key_of(*facts)


class GlobalStorage:
    """What a global tensor and its views share.

    Attributes:
        key: tells how the values were made; the same on all ranks that have run the same code.
        name: under which the module knows it, with ``grad:`` before that of a gradient; else None.
        copies: what was fetched of it since it was last written, by extent.
    """

    def __init__(self, key: int, name: str | None = None) -> None:
        self.key = key
        self.name = name
        self.copies: dict[Extent, Tensor] = {}

    def written(self, key: int) -> None:
        """Note that its values are others now."""
        self.key = key
        self.copies.clear()


class TensorView(Protocol):
    """What tensors ask of the :class:`~.view.GlobalView` that made them."""

    device: torch.device

    @property
    def is_entered(self) -> bool: ...  # noqa: D102
    def remember(self, tensor: GlobalTensor) -> None: ...  # noqa: D102
    def run(self, call: Call) -> Any: ...  # noqa: D102
    def plain(self, structure: Any) -> Any: ...  # noqa: D102


# What there is of one tensor:
#     on its owner      meta (shape, strides), local (the values)
#     on other ranks    meta, and a copy in global_storage once its values were fetched
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

    global_view: TensorView
    owner: int
    local: Tensor | None
    meta: Tensor
    global_storage: GlobalStorage

    @staticmethod
    def __new__(
        cls,
        view: TensorView,
        owner: int,
        meta: Tensor,
        local: Tensor | None,
        storage: GlobalStorage,
    ) -> GlobalTensor:
        """A tensor like ``meta`` with the values ``local``, which ranks other than ``owner`` do not have."""
        self: GlobalTensor = wrapper_subclass(cls, meta, view.device)
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
        cls,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Called outside of the view, and inside of it where modes are off."""
        call = Call(function, tuple(args), dict(kwargs or {}))
        tensor = call.global_tensors()[0]
        if tensor.global_view.is_entered:
            return tensor.global_view.run(call)
        if function is torch.ops.aten.detach.default:  # autograd's own, which reads nothing
            return tensor.alias()
        raise OutsideViewError(
            f"{function} at {user_location()} uses {tensor.describe()}, whose values are on rank {tensor.owner} of the "
            "pipeline. Other ranks' tensors can be used in hooks and callbacks, where all ranks run the same code, but "
            "not here. Do it in a hook such as `on_train_batch_end`, or keep it in a buffer, which hooks may change "
            "in place and steps may use."
        )

    @property
    def extent(self) -> Extent:
        """What it shows of its memory."""
        meta = self.meta
        return tuple(meta.shape), tuple(meta.stride()), int(meta.storage_offset()), str(meta.dtype)

    def alias(self) -> GlobalTensor:
        """Another object for the same values."""
        return GlobalTensor(self.global_view, self.owner, self.meta.detach(), self.local, self.global_storage)

    def describe(self) -> str:
        """The tensor as error messages name it: its parameter's name, if it has one, and its shape."""
        shape = f"a tensor of shape {tuple(self.shape)}"
        name = self.global_storage.name
        return shape if name is None else f"{name!r}, {shape}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """As of a plain tensor within the view, on all ranks; else without values."""
        if self.global_view.is_entered:
            return repr(self.global_view.plain(self))
        return f"GlobalTensor({self.describe()} on rank {self.owner} of the pipeline)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with memory of its own, where this one's values are."""
        if id(self) in memo:
            return memo[id(self)]
        copy: Any = self.detach().clone()
        copy.requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            copy = nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy


def key_of(*facts: Any) -> int:
    """A digest that is the same in all processes."""
    return zlib.crc32(repr(facts).encode())


def map_arguments(function: Callable[[Any], Any], structure: Any) -> Any:
    """``structure`` of tuples, lists and dicts with ``function`` applied to all that is none of these."""
    if isinstance(structure, dict):
        return {key: map_arguments(function, child) for key, child in structure.items()}
    if not isinstance(structure, (tuple, list)):
        return function(structure)
    members = [map_arguments(function, child) for child in structure]
    if hasattr(structure, "_fields"):  # a named tuple takes its members one by one
        return type(structure)(*members)
    return type(structure)(members)
