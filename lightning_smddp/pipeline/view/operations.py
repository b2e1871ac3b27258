"""Operations on global tensors: what hooks call above autograd, where an operation is done, and what each rank gets.

Above autograd parameters become global tensors, and values that leave torch are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_smddp._compat.torch import WITHOUT_MARKS, OperatorFacts, operator_facts, storage_key
from lightning_smddp._compat.torch_steps import mode_within_backwards
from lightning_smddp.pipeline.capture.ops import (
    DRAW_BY_VALUE,
    Kind,
    asks_for_device,
    kind_of,
    name_of,
    sets_flag,
    user_location,
)
from lightning_smddp.pipeline.view.global_tensor import (
    GRADIENT,
    Call,
    GlobalStorage,
    GlobalTensor,
    GlobalViewError,
    View,
    key_of,
)

# Give a tensor's memory to Python, or make something of its values that is no tensor.
_READERS = {
    "__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "__str__", "as_tensor", "data_ptr", "numpy",
    "storage", "tensor", "tolist", "untyped_storage", "share_memory_",
}  # fmt: skip


class ViewFunctions(TorchFunctionMode):
    """Sees the calls of user code in a hook."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        view = self.view
        name = name_of(function)
        attribute = getattr(function, "__name__", None)
        # Some calls have a rule of their own; all others run on global tensors, and their operators come to
        # `run_operator`. First, values that leave torch: they are fetched, and the function gets plain tensors.
        if name in _READERS:
            args, kwargs = view.plain(view.as_global((args, kwargs)))
            return function(*args, **kwargs)
        if name == "cpu" and args[0].grad_fn is None:  # for other uses than autograd's
            copied = view.plain(view.as_global(args[0])).detach().clone()
            return function(copied, *args[1:], **kwargs)
        # `.data`, `.grad` and `.requires_grad` of a parameter are those of its global tensor, too.
        if attribute in ("__set__", "__delete__"):
            return self._set(name, function, args)
        found = view.find(args[0]) if args else None
        if name == "__deepcopy__":
            return view.as_global(args[0]).__deepcopy__(args[1])
        if name == "grad" and attribute == "__get__" and found is not None:
            view.tensors.load_gradients()
            return view.tensors.as_global(found).grad
        # What needs no values (a shape, a hook for gradients, which fires where the parameter is): the module's own.
        kind = kind_of(function, args)
        if kind is Kind.WATCHER or sets_flag(function) or (kind is Kind.METADATA and not asks_for_device(name)):
            return function(*args, **kwargs)
        args, kwargs = view.as_global((args, kwargs))
        if kind is not Kind.BACKWARD:
            result = function(*args, **kwargs)
            # In-place operations give the user's own object back, as `self.weight += 1` puts it where it was.
            return view.own_object(result) if isinstance(result, GlobalTensor) else result
        view.tensors.load_gradients()  # it adds to them
        with mode_within_backwards(self):
            return function(*args, **kwargs)

    def _set(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What setting the attribute ``name`` of a tensor does, or without a value deleting it."""
        found = self.view.find(args[0])
        if name == "grad" and found is not None:
            self.view.tensors.load_gradients()
            made_by = [value.global_storage.key for value in args[1:] if isinstance(value, GlobalTensor)]
            self.view.note_write(GRADIENT + found.name, key_of(made_by))
            return function(self.view.tensors.as_global(found), *args[1:])
        if name == "data" and (found is not None or isinstance(args[0], GlobalTensor)):
            return self.view.set_data(*args)
        return function(*args)


def run_operator(view: View, call: Call) -> Any:
    """What one operator call on global tensors gives on this rank."""
    found = [leaf for leaf in call.leaves() if isinstance(leaf, GlobalTensor)]
    facts = operator_facts(call.function)
    if call.function in WITHOUT_MARKS:  # memory does not tell the mark: values that are sent would lose it
        return _at_owner(view, call._replace(function=WITHOUT_MARKS[call.function]), found, facts)
    if facts.changes_shape:
        raise GlobalViewError(
            f"{facts.name} at {user_location()} changes the shape of {found[0].describe()} in place, which a "
            "pipeline cannot do for a tensor of another rank. Make a new tensor instead."
        )
    if facts.is_foreach and len(call.args[0]) > 1:
        return _each(call)

    # What is written says where it is done: a plain tensor is one of every rank's, so all of them write it.
    written = [leaf for leaf in facts.written(call.args, call.kwargs) if isinstance(leaf, Tensor)]
    are_global = {isinstance(tensor, GlobalTensor) for tensor in written}
    if len(are_global) > 1:
        raise GlobalViewError(
            f"{facts.name} at {user_location()} writes a tensor of one rank and a tensor of all ranks at once."
        )
    leaves_device = torch.device(call.kwargs.get("device") or view.device).type != view.device.type
    by_value = facts.name.removeprefix("aten::") in DRAW_BY_VALUE  # every rank has to do them
    if are_global == {False} or leaves_device or not facts.makes_tensors or by_value:
        return _everywhere(view, call, found)
    return _at_owner(view, call, found, facts)


def _everywhere(view: View, call: Call, found: Sequence[GlobalTensor]) -> Any:
    """All ranks fetch what they lack, and do it."""
    copies = view.fetch(found)
    return call.run(lambda leaf: copies.get(id(leaf), leaf))


def _at_owner(view: View, call: Call, found: Sequence[GlobalTensor], facts: OperatorFacts) -> Any:
    """The owner of what is written, or of what is read, does it; the other ranks get a result without values."""
    written = [leaf for leaf in facts.written(call.args, call.kwargs) if isinstance(leaf, GlobalTensor)]
    owner = _owner_of(written or found)
    shapes: Any = None
    if not facts.only_writes:
        try:
            # Every rank works the result's shape out on the meta device, so that ranks without values have the same
            # tensor in hand without a message. Where that fails, all of them do the operation on fetched values.
            shapes = call.run(_meta)
        except Exception:
            # The shape depends on values, or there is no such kernel, or it is the user's error.
            return _everywhere(view, call, found)
    # Ranks that give an operator other numbers do different things, too.
    numbers = [leaf for leaf in call.leaves() if isinstance(leaf, (int, float, complex, str))]
    key = key_of(facts.name, numbers, [(tensor.global_storage.key, tensor.extent) for tensor in found])
    copies = view.fetch([tensor for tensor in found if tensor.owner != owner])
    real = None
    if view.rank == owner:
        real = call.run(lambda leaf: copies.get(id(leaf), _local(leaf)))
    elif facts.draws:  # every rank's generator goes on alike
        call.run(lambda leaf: _any_values(view, leaf))
    for tensor in written:
        view.changed(tensor, key_of(key, tensor.extent))
    if not facts.only_writes:
        return _wrap(view, shapes, real, owner, found, key)
    if facts.num_returns == 0:
        return None
    return written[0] if facts.num_returns == 1 else tuple(written)


def _wrap(view: View, shapes: Any, real: Any, owner: int, found: Sequence[GlobalTensor], key: int) -> Any:
    """Global tensors for the tensors in ``shapes``; ``real`` has their values, on the owner."""
    if isinstance(shapes, (tuple, list)):
        members = [None] * len(shapes) if real is None else real
        wrapped = [
            _wrap(view, shape, member, owner, found, key_of(key, index))
            for index, (shape, member) in enumerate(zip(shapes, members, strict=True))
        ]
        return type(shapes)(wrapped)
    if not isinstance(shapes, Tensor):
        return shapes
    # The meta tensors of a view and of what it shows have one storage, as the real ones have.
    memory = storage_key(shapes)
    for tensor in found:
        if storage_key(tensor.meta) == memory:
            return GlobalTensor(view, owner, shapes, real, tensor.global_storage)
    return GlobalTensor(view, owner, shapes, real, GlobalStorage(key))


def _owner_of(tensors: Sequence[GlobalTensor]) -> int:
    """Where an operation on ``tensors`` is done: with the parameters, as they are used again; of these the largest."""
    candidates = [tensor for tensor in tensors if tensor.global_storage.name is not None] or tensors
    return max(candidates, key=GlobalTensor.numel).owner


def _each(call: Call) -> Any:
    """A ``_foreach_`` operator, whose tensors may be on several ranks: once for each."""
    count = len(call.args[0])
    results: list[Any] = []
    for index in range(count):
        # Lists of other lengths, and all else, are the same for all.
        args = [_member(arg, index, count) for arg in call.args]
        kwargs = {key: _member(value, index, count) for key, value in call.kwargs.items()}
        results += call.function(*args, **kwargs) or ()
    return results or None


def _member(arg: Any, index: int, count: int) -> Any:
    """A list of ``count`` with the one at ``index`` alone; anything else as it is."""
    if isinstance(arg, (list, tuple)) and len(arg) == count:
        return [arg[index]]
    return arg


def _local(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, GlobalTensor) else leaf


def _any_values(view: View, leaf: Any) -> Any:
    """In place of values of another rank: ones, which are valid as a probability, a weight and a deviation."""
    if isinstance(leaf, GlobalTensor):
        return torch.ones(leaf.shape, dtype=leaf.dtype, device=view.device)
    return leaf


def _meta(leaf: Any) -> Any:
    """What stands for an argument where only the shape of the result is wanted."""
    if isinstance(leaf, GlobalTensor):
        return leaf.meta
    if isinstance(leaf, Tensor):
        return leaf.to("meta")
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return None if isinstance(leaf, torch.Generator) else leaf
