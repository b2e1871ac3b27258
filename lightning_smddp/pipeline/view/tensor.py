"""A tensor whose values are on one rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import disabled_torch_function, wrapper_subclass
from lightning_smddp.pipeline.capture.user_code import user_location


class GlobalViewError(RuntimeError):
    """A tensor of another rank was used where its rank does not take part."""


class OutsideViewError(GlobalViewError):
    """What a hook has kept was used elsewhere."""


class SharedViewError(GlobalViewError):
    """The same one on every rank of the pipeline, wherever each is in the hook."""


class Call(NamedTuple):
    """An operator with its arguments: global tensors and others, also in tuples, lists and dicts."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def global_tensors(self) -> list[GlobalTensor]:
        """Those among the arguments, in order."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, GlobalTensor)]

    def leaves(self) -> list[Any]:
        """The arguments, with those in containers each for itself."""
        return _flat((self.args, self.kwargs))

    def run(self, change: Callable[[Any], Any]) -> Any:
        """The result, with what ``change`` makes of each of the :meth:`leaves` in its place."""
        args = map_arguments(change, self.args)
        kwargs = map_arguments(change, self.kwargs)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Recipe:
    """How a value was made of others: for a rank that asks for it alone, when its home never made it.

    Attributes:
        call: the operation.
        versions: of the memory of each :class:`GlobalTensor` among the arguments at that time.
    """

    call: Call
    versions: tuple[int, ...]


class Memory:
    """What a tensor and its views share.

    Attributes:
        version: grows with each write, alike on all ranks that run the same code.
        leaf: the name under which the module knows it, with ``grad:`` before that of a gradient; else None.
        copy: the values on every rank as they were fetched, flat in the order of the memory; None if they were not, or
            were written since.
    """

    __slots__ = ("copy", "leaf", "version")

    def __init__(self, leaf: str | None = None) -> None:
        self.version = 0
        self.leaf = leaf
        self.copy: Tensor | None = None

    def written(self) -> None:
        """Note that its values changed, so that copies and later reads do not use old ones."""
        self.version += 1
        self.copy = None


class View(Protocol):
    """What tensors, operations and requests ask of the :class:`~.global_view.GlobalView` that they belong to.

    Attributes:
        module: divided among the ranks of ``group``.
        device: of this rank.
        rank: of this process in ``group``.
        serial: of the tensor that was made last; the same on all ranks.
    """

    module: nn.Module
    group: dist.ProcessGroup
    device: torch.device
    rank: int
    serial: int

    @property
    def is_entered(self) -> bool:
        """Whether user code runs within it now."""
        ...

    def run_operator(self, call: Call) -> Any:
        """The result of one operator call, on this rank."""
        ...

    def next_serial(self, tensor: GlobalTensor) -> int:
        """A number for a new tensor, the same on all ranks."""
        ...

    def alias(self, tensor: GlobalTensor) -> GlobalTensor:
        """Another object for the same values."""
        ...

    # ---- the module's own tensors, and their stand-ins ----

    def knows(self, tensor: object) -> bool:
        """Whether it is one of the module's parameters or buffers."""
        ...

    def stand_in_for(self, tensor: Tensor) -> GlobalTensor:
        """What a parameter or buffer of the module is within the view."""
        ...

    def stand_in(self, structure: Any) -> Any:
        """``structure`` with stand-ins in place of the module's parameters and buffers."""
        ...

    def own_object(self, tensor: GlobalTensor) -> Tensor:
        """The module's own tensor, if ``tensor`` is its stand-in; else ``tensor``."""
        ...

    # ---- values ----

    def plain(self, structure: Any) -> Any:
        """``structure`` with plain tensors, this rank's own, in place of global ones. Collective if there are any."""
        ...

    def fetch(self, tensors: Sequence[GlobalTensor]) -> list[Tensor]:
        """The values of ``tensors`` on every rank, not to be written. Collective, unless all were fetched already."""
        ...

    def keep_copy(self, tensor: GlobalTensor, values: Tensor) -> None:
        """``values`` of ``tensor`` are on every rank now."""
        ...

    def tell(self, value: Any, home: int, function: Any) -> Any:
        """What ``home`` has found out, on every rank. Collective."""
        ...

    # ---- changes ----

    def set_data(self, target: Tensor, value: Tensor) -> None:
        """What ``target.data = value`` does; shape and dtype have to stay."""
        ...

    def gradient(self, parameter: Tensor) -> Any:
        """What ``parameter.grad`` is within the view. Collective at the first look at any gradient."""
        ...

    def set_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """What ``parameter.grad = value`` does within the view. Collective as :meth:`gradient`."""
        ...

    def note_write(self, tensor: GlobalTensor) -> None:
        """An operation has changed ``tensor``."""
        ...

    def note_operation(self, name: str, tensors: Sequence[GlobalTensor]) -> None:
        """An operation is done with ``tensors``: what ranks do has to be the same."""
        ...

    def share_random_state(self) -> None:
        """From here to the hook's end all ranks draw what the first one draws."""
        ...


# What there is of one tensor:
#     on its home       meta (shape, strides), local (the values)
#     on other ranks    meta, and memory.copy once its values were fetched
class GlobalTensor(Tensor):
    """The same tensor on every rank of a pipeline; one of them, its *home*, has the values.

    It has the shape, dtype, strides and the device of the rank; autograd works on it. Operations on it need the
    :class:`View` that made it to be entered on all ranks.

    Attributes:
        global_view: whose it is.
        home: rank in the pipeline.
        local: the values, on the home; None elsewhere.
        meta: a stand-in on the meta device that shares memory with those of its views.
        memory: shared with its views.
        serial: the same on all ranks.
        recipe: see there; None where there is no need for it, or none can be kept.
    """

    global_view: View
    home: int
    local: Tensor | None
    meta: Tensor
    memory: Memory
    serial: int
    recipe: Recipe | None

    @staticmethod
    def __new__(cls, view: View, home: int, meta: Tensor, local: Tensor | None, memory: Memory) -> GlobalTensor:
        """A tensor like ``meta`` with the values ``local``, which ranks other than ``home`` do not have."""
        self: GlobalTensor = wrapper_subclass(cls, meta, view.device)
        self.global_view = view
        self.home = home
        self.local = local
        self.meta = meta
        self.memory = memory
        self.serial = view.next_serial(self)
        self.recipe = None
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
        view = tensor.global_view
        if view.is_entered:
            return view.run_operator(call)
        if function is torch.ops.aten.detach.default:  # autograd's own, which reads nothing
            return view.alias(tensor)
        raise OutsideViewError(
            f"{function} at {user_location()} uses {tensor.describe()}, whose values are on rank {tensor.home} of the "
            "pipeline. Other ranks' tensors can be used in hooks and callbacks, where all ranks run the same code, but "
            "not here. Do it in a hook such as `on_train_batch_end`, or keep it in a buffer, which hooks may change "
            "in place and steps may use."
        )

    def describe(self) -> str:
        """The tensor as error messages name it: its parameter's name, if it has one, and its shape."""
        shape = f"a tensor of shape {tuple(self.shape)}"
        if self.memory.leaf is None:
            return shape
        return f"{self.memory.leaf!r}, {shape}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """As of a plain tensor within the view, on all ranks; else without values."""
        if self.global_view.is_entered:
            return repr(self.global_view.plain(self))
        return f"GlobalTensor({self.describe()} on rank {self.home} of the pipeline)"

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

    @property
    def is_whole(self) -> bool:
        """Whether it shows all of its memory in order, so that a copy of the memory serves it."""
        return self.meta.untyped_storage().nbytes() == self.numel() * self.dtype.itemsize


def _flat(structure: Any) -> list[Any]:
    """Leaves of what operators take: tuples, lists and dicts."""
    found: list[Any] = []
    _collect(structure, found)
    return found


def _collect(structure: Any, found: list[Any]) -> None:
    if isinstance(structure, (tuple, list)):
        for child in structure:
            _collect(child, found)
    elif isinstance(structure, dict):
        for child in structure.values():
            _collect(child, found)
    else:
        found.append(structure)


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
