"""Operations on global tensors: what hooks call above autograd, where an operation is done, and what each rank gets.

Above autograd parameters become global tensors, and values that leave torch are fetched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_smddp._compat.torch import (
    WITHOUT_MARKS,
    DispatchMode,
    OperatorFacts,
    operator_facts,
    storage_key,
    without_torch_function,
)
from lightning_smddp._compat.torch_steps import mode_within_backwards
from lightning_smddp.pipeline.capture.ops import Kind, asks_for_device, kind_of, name_of, user_location
from lightning_smddp.pipeline.view.global_tensor import (
    Call,
    GlobalStorage,
    GlobalTensor,
    GlobalViewError,
    key_of,
    map_arguments,
)
from lightning_smddp.pipeline.view.module_tensors import View

# Give a tensor's memory to Python, or make something of its values that is no tensor.
_READERS = {
    "__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "__str__", "as_tensor", "data_ptr", "numpy",
    "storage", "tensor", "tolist", "untyped_storage", "share_memory_",
}  # fmt: skip

# How many numbers they draw depends on the values that they are given: every rank has to do them.
_DRAW_BY_VALUE = {"aten::poisson", "aten::binomial", "aten::_standard_gamma", "aten::_sample_dirichlet"}
# Tensors of several elements in, one Python value out: that is sent, and not the tensors.
_SENT_AS_VALUE = {"aten::equal", "aten::_fused_sdp_choice"}


class ViewFunctions(TorchFunctionMode):
    """Sees the calls of user code in a hook."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        view = self.view
        name = name_of(function)
        # Some calls have a rule of their own; all others run on global tensors, and their operators come to
        # ViewOperations. First, values that leave torch: they are fetched, and the function gets plain tensors.
        if name in _READERS:
            args, kwargs = view.plain((view.as_global(args), view.as_global(kwargs)))
            return function(*args, **kwargs)
        if name in ("cpu", "to") and self._goes_to_host(name, *args, **kwargs):
            return function(view.plain(view.as_global(args[0])).detach().clone(), *args[1:], **kwargs)
        attribute = getattr(function, "__name__", None)
        # `.data`, `.grad` and `.requires_grad` of a parameter are those of its global tensor, too.
        if attribute in ("__set__", "__delete__"):
            return self._set(name, attribute, function, args)
        if name == "__deepcopy__":
            copied = view.as_global(args[0])
            if isinstance(copied, GlobalTensor):
                return copied.__deepcopy__(args[1])
            return function(*args, **kwargs)
        if name == "requires_grad_" and view.find(args[0]):
            return self._flag(args[0], function, args, kwargs)
        if name == "grad" and attribute == "__get__":
            parameter = view.find(args[0])
            if parameter is not None:
                return view.gradients.get(parameter)
        # What needs no values (a shape, a hook for gradients, which fires where the parameter is): the module's own.
        kind = kind_of(function, args)
        if kind is Kind.WATCHER or (kind is Kind.METADATA and not asks_for_device(name)):
            return function(*args, **kwargs)
        within: AbstractContextManager[Any] = nullcontext()
        if kind is Kind.BACKWARD:
            within = mode_within_backwards(self)
        with within:
            result = function(*view.as_global(args), **view.as_global(kwargs))
        if isinstance(result, GlobalTensor):  # in-place operations give the user's own object back
            return view.own_object(result)
        return result

    def _goes_to_host(self, name: str, tensor: Tensor, device: Any = None, *args: Any, **kwargs: Any) -> bool:
        """Whether values are wanted on the CPU, for other uses than autograd's."""
        is_global = isinstance(tensor, GlobalTensor) or self.view.find(tensor) is not None
        if not is_global or tensor.grad_fn is not None:
            return False
        if name == "cpu":
            return True
        is_named = isinstance(device, (str, torch.device)) and self.view.device.type != "cpu"
        return is_named and torch.device(device).type == "cpu"

    def _set(self, name: str, attribute: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What setting or deleting the attribute ``name`` of a tensor does."""
        target = args[0]
        found = self.view.find(target)
        if name == "grad" and found is not None:
            return self.view.gradients.set(found, args[1] if attribute == "__set__" else None)
        if name == "requires_grad" and found is not None:
            return self._flag(target, function, args, {})
        if name == "data" and (found is not None or isinstance(target, GlobalTensor)):
            return self.view.set_data(target, args[1])
        return function(*args)

    def _flag(self, parameter: Tensor, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Set ``requires_grad`` of a parameter, and of its global tensor."""
        result = function(*args, **kwargs)
        self.view.as_global(parameter).requires_grad_(parameter.requires_grad)
        return result


class ViewOperations(DispatchMode):
    """Sees the operators that those calls come to, also in backward passes."""

    def __init__(self, view: View) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.view = view

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.view.run(Call(function, tuple(args), dict(kwargs or {})))


def refuse_new_parameters(modules: Set[int]) -> Callable[[nn.Module, str, Any], None]:
    """A hook for the registration of parameters: those of ``modules``, by id, may not be replaced in a hook."""

    def hook(module: nn.Module, name: str, parameter: Any) -> None:
        if id(module) in modules and parameter is not module._parameters.get(name):
            raise GlobalViewError(
                f"Parameter {name!r} of a {type(module).__name__} is replaced by another one at {user_location()}, "
                "in a hook: a pipeline has divided the parameters that it had. Change its values "
                "(`p.data.copy_(...)`), or make the change in `__init__` or `configure_model`."
            )

    return hook


def values_into_buffers(view: View, modules: Set[int]) -> Callable[[nn.Module, str, Any], Any]:
    """A hook for the registration of buffers: a new value for one of ``modules`` goes into the tensor that it has."""

    def hook(module: nn.Module, name: str, value: Any) -> Any:
        before = module._buffers.get(name)
        if id(module) not in modules or value is before or not isinstance(value, Tensor):
            return value
        with without_torch_function():  # our own looks at tensors are not the user's
            if before is None or not view.find(before):
                return view.plain(value)
            view.set_data(before, value)
        return before

    return hook


class Operations:
    """Does what the operators of a view's code are called with.

    Args:
        view: decides what is fetched, and makes new tensors.
    """

    def __init__(self, view: View) -> None:
        self.view = view

    def run(self, call: Call) -> Any:
        """The result of one operator call, on this rank."""
        found = call.global_tensors()
        facts = operator_facts(call.function)
        if not found:
            return call.function(*call.args, **call.kwargs)
        self.view.is_used = True
        if call.function in WITHOUT_MARKS:  # memory does not tell the mark: values that are sent would lose it
            call = call._replace(function=WITHOUT_MARKS[call.function])
            return self._at_owner(call, found, facts)
        if facts.changes_shape:
            raise GlobalViewError(
                f"{facts.name} at {user_location()} changes the shape of {found[0].describe()} in place, which a "
                "pipeline cannot do for a tensor of another rank. Make a new tensor instead."
            )
        if facts.is_foreach and _is_mixed(call):
            return self._each(call)
        if facts.name in _SENT_AS_VALUE:
            return self._value_of_owner(call, found, facts)
        # What is written says where it is done: a plain tensor is one of every rank's, so all of them write it.
        written = [leaf for leaf in facts.written(call.args, call.kwargs) if isinstance(leaf, Tensor)]
        are_global = {isinstance(tensor, GlobalTensor) for tensor in written}
        if len(are_global) > 1:
            raise GlobalViewError(
                f"{facts.name} at {user_location()} writes a tensor of one rank and a tensor of all ranks at once."
            )
        if are_global == {False} or not facts.makes_tensors or facts.name in _DRAW_BY_VALUE:
            return self._everywhere(call, found)
        return self._at_owner(call, found, facts)

    # ---- at one rank ----

    def _at_owner(self, call: Call, found: Sequence[GlobalTensor], facts: OperatorFacts) -> Any:
        """The owner of what is written, or of what is read, does it; the other ranks get a result without values."""
        all_written = facts.written(call.args, call.kwargs)
        written = [tensor for tensor in all_written if isinstance(tensor, GlobalTensor)]
        owner = _owner_of(written or found)
        shapes: Any = None
        if not facts.only_writes:
            try:
                # Every rank works the result's shape out on the meta device, so that ranks without values have the same
                # tensor in hand without a message. Where that fails, all of them do the operation on fetched values.
                shapes = call.function(*map_arguments(_meta, call.args), **map_arguments(_meta, call.kwargs))
            except Exception:
                # The shape depends on values, or there is no such kernel, or it is the user's error.
                return self._everywhere(call, found)
        key = call.key(facts.name)
        copies = self._fetch([tensor for tensor in found if tensor.owner != owner])
        real = None
        if self.view.rank == owner:
            real = call.run(lambda leaf: copies.get(id(leaf), _local(leaf)))
        elif facts.draws:  # every rank's generator goes on alike
            call.run(self._something_to_draw_by)
        for tensor in written:
            self.view.note_write(tensor, key_of(key, tensor.extent))
        if facts.only_writes:
            return _in_order_of_returns(facts, written)
        return self._wrap(shapes, real, owner, found, key)

    def _fetch(self, tensors: Sequence[GlobalTensor]) -> dict[int, Tensor]:
        """By id, the values of ``tensors``. Collective if there are any."""
        return dict(zip(map(id, tensors), self.view.fetch(tensors), strict=True))

    def _something_to_draw_by(self, leaf: Any) -> Any:
        """In place of values of another rank: ones, which are valid as a probability, a weight and a deviation."""
        if isinstance(leaf, GlobalTensor):
            return torch.ones(leaf.shape, dtype=leaf.dtype, device=self.view.device)
        return leaf

    def _wrap(self, shapes: Any, real: Any, owner: int, found: Sequence[GlobalTensor], key: int) -> Any:
        """Global tensors for the tensors in ``shapes``; ``real`` has their values, on the owner."""
        if isinstance(shapes, (tuple, list)):
            members = [None] * len(shapes) if real is None else real
            wrapped = []
            for index, (shape, member) in enumerate(zip(shapes, members, strict=True)):
                wrapped.append(self._wrap(shape, member, owner, found, key_of(key, index)))
            return type(shapes)(wrapped)
        if not isinstance(shapes, Tensor):
            return shapes
        # The meta tensors of a view and of what it shows have one storage, as the real ones have.
        memory = storage_key(shapes)
        for tensor in found:
            if tensor.meta is shapes:
                return tensor
            if storage_key(tensor.meta) == memory:
                return GlobalTensor(self.view, owner, shapes, real, tensor.global_storage)
        # Ranks without values go by the strides of the meta tensor, which a kernel need not have kept to.
        if real is not None and real.stride() != shapes.stride():
            laid_out = torch.empty_strided(shapes.shape, shapes.stride(), dtype=shapes.dtype, device=real.device)
            real = laid_out.copy_(real)
        return GlobalTensor(self.view, owner, shapes, real, GlobalStorage(key))

    # ---- at every rank ----

    def _everywhere(self, call: Call, found: Sequence[GlobalTensor]) -> Any:
        """All ranks fetch what they lack, and do it."""
        copies = self._fetch(found)
        return call.run(lambda leaf: copies.get(id(leaf), leaf))

    def _value_of_owner(self, call: Call, found: Sequence[GlobalTensor], facts: OperatorFacts) -> Any:
        """One rank does it, and sends the others the result, which is no tensor. Collective."""
        owner = _owner_of(found)
        copies = self._fetch([tensor for tensor in found if tensor.owner != owner])
        value = None
        if self.view.rank == owner:
            value = call.run(lambda leaf: copies.get(id(leaf), _local(leaf)))
        return self.view.of_owner(value, owner, f"{facts.name} at {user_location()}", call.key(facts.name))

    # ---- lists of tensors ----

    def _each(self, call: Call) -> Any:
        """A ``_foreach_`` operator whose tensors are on several ranks: once for each of these."""
        first = _first_list(call)
        count = len(first)
        places: dict[int | None, list[int]] = {}
        for index, tensor in enumerate(first):
            places.setdefault(getattr(tensor, "owner", None), []).append(index)
        # Lists of other lengths, and all else, are the same for all places.
        results: list[Any] = [None] * count
        returned: Any = None
        for chosen in places.values():
            args = tuple(_members(arg, chosen, count) for arg in call.args)
            kwargs = {key: _members(value, chosen, count) for key, value in call.kwargs.items()}
            returned = self.run(Call(call.function, args, kwargs))
            if returned is not None:
                for index, value in zip(chosen, returned, strict=True):
                    results[index] = value
        return None if returned is None else results


def _owner_of(tensors: Sequence[GlobalTensor]) -> int:
    """Where an operation on ``tensors`` is done: with the parameters, as they are used again; else with most bytes."""
    candidates = [tensor for tensor in tensors if tensor.global_storage.name is not None] or tensors
    sizes: dict[int, int] = defaultdict(int)
    for tensor in candidates:
        sizes[tensor.owner] += tensor.numel() * tensor.dtype.itemsize
    return max(sizes, key=lambda owner: (sizes[owner], -owner))


def _first_list(call: Call) -> Sequence[Any]:
    """The first list among the arguments, of which the others' places follow; empty if there is none."""
    return next((arg for arg in call.args if isinstance(arg, (list, tuple))), ())


def _is_mixed(call: Call) -> bool:
    """Whether the first list has tensors of different ranks."""
    return len({getattr(leaf, "owner", None) for leaf in _first_list(call)}) > 1


def _members(arg: Any, chosen: Sequence[int], count: int) -> Any:
    """The ``chosen`` ones of a list of ``count``; anything else as it is."""
    if isinstance(arg, (list, tuple)) and len(arg) == count:
        return [arg[index] for index in chosen]
    return arg


def _local(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, GlobalTensor) else leaf


def _meta(leaf: Any) -> Any:
    """What stands for an argument where only the shape of the result is wanted."""
    if isinstance(leaf, GlobalTensor):
        return leaf.meta
    if isinstance(leaf, Tensor):
        return leaf.to("meta")
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return None if isinstance(leaf, torch.Generator) else leaf


def _in_order_of_returns(facts: OperatorFacts, written: list[GlobalTensor]) -> Any:
    if facts.num_returns == 0:
        return None
    return written[0] if facts.num_returns == 1 else tuple(written)
