"""Operations on global tensors: what hooks call above autograd, where an operation is done, and what each rank gets.

Above autograd parameters become what all ranks see, and values that leave torch are fetched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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
from lightning_smddp.pipeline.capture.ops import Kind, asks_for_device, kind_of, name_of
from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.pipeline.view.tensor import (
    Call,
    GlobalTensor,
    GlobalViewError,
    Memory,
    Recipe,
    View,
    map_arguments,
)
from lightning_smddp.wire.pytree import leaves, map_leaves

# Give a tensor's memory to Python, or make something of its values that is no tensor.
_READERS = {
    "__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "__str__", "as_tensor", "data_ptr", "numpy",
    "storage", "tensor", "tolist", "untyped_storage", "share_memory_",
}  # fmt: skip

# How many numbers they draw depends on the values that they are given: every rank has to do them.
_DRAW_BY_VALUE = {"aten::poisson", "aten::binomial", "aten::_standard_gamma", "aten::_sample_dirichlet"}
# Tensors of several elements in, one Python value out: it is told, so that the tensors need not be sent.
_TOLD = {"aten::equal", "aten::_fused_sdp_choice"}
_SMALL = 64  # elements of a tensor that a recipe may keep alive


class ViewFunctions(TorchFunctionMode):
    """Sees the calls of user code in a hook."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        view = self.view
        name = name_of(function)
        # Some calls have a rule of their own; all others run on stand-ins, and their operators come to ViewOperations.
        # First, values that leave torch: they are fetched, and the function gets plain tensors.
        if name in _READERS:
            shown = (view.stand_in(args), view.stand_in(kwargs))
            args, kwargs = view.plain(shown)
            return function(*args, **kwargs)
        attribute = getattr(function, "__name__", None)
        # `.data`, `.grad` and `.requires_grad` of a parameter are those of its stand-in, too.
        if attribute in ("__set__", "__delete__"):
            return self._set(name, attribute, function, args)
        if name == "__deepcopy__":
            shown = view.stand_in(args[0])
            if isinstance(shown, GlobalTensor):
                return shown.__deepcopy__(args[1])
            return function(*args, **kwargs)
        if name == "requires_grad_" and view.knows(args[0]):
            return self._flag(args[0], function, args, kwargs)
        if name == "grad" and attribute == "__get__" and view.knows(args[0]):
            return view.gradient(args[0])
        # What needs no values (a shape, a hook for gradients, which fires where the parameter is): the module's own.
        kind = kind_of(function, args)
        if kind is Kind.WATCHER or (kind is Kind.METADATA and not asks_for_device(name)):
            return function(*args, **kwargs)
        within: AbstractContextManager[Any] = nullcontext()
        if kind is Kind.BACKWARD:
            within = mode_within_backwards(self)
        with within:
            result = function(*view.stand_in(args), **view.stand_in(kwargs))
        if isinstance(result, GlobalTensor):  # in-place operations give the user's own object back
            return view.own_object(result)
        return result

    def _set(self, name: str, attribute: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What setting or deleting the attribute ``name`` of a tensor does."""
        target = args[0]
        known = self.view.knows(target)
        if name == "grad" and known:
            value = None
            if attribute == "__set__":
                value = args[1]
            return self.view.set_gradient(target, value)
        if name == "requires_grad" and known:
            return self._flag(target, function, args, {})
        if name == "data" and (known or isinstance(target, GlobalTensor)):
            return self.view.set_data(target, args[1])
        return function(*args)

    def _flag(self, parameter: Tensor, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Set ``requires_grad`` of a parameter, and of its stand-in."""
        result = function(*args, **kwargs)
        self.view.stand_in_for(parameter).requires_grad_(parameter.requires_grad)
        return result


class ViewOperations(DispatchMode):
    """Sees the operators that those calls come to, also in backward passes."""

    def __init__(self, view: View) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.view = view

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(function, tuple(args), dict(kwargs or {}))
        return self.view.run_operator(call)


def any_leaf(predicate: Callable[[Any], bool], structure: Any) -> bool:
    """Whether ``predicate`` is true of a leaf of ``structure``."""
    return any(predicate(leaf) for leaf in leaves(structure))


def refuse_new_parameter(root: nn.Module) -> Callable[[nn.Module, str, Any], None]:
    """A hook for the registration of parameters: those of ``root`` may not be replaced in a hook."""
    modules = {id(module) for module in root.modules()}

    def hook(module: nn.Module, name: str, parameter: Any) -> None:
        if id(module) in modules and parameter is not module._parameters.get(name):
            raise GlobalViewError(
                f"Parameter {name!r} of a {type(module).__name__} is replaced by another one at {user_location()}, "
                "in a hook: a pipeline has divided the parameters that it had. Change its values "
                "(`p.data.copy_(...)`), or make the change in `__init__` or `configure_model`."
            )

    return hook


def keep_buffers(view: View) -> Callable[[nn.Module, str, Any], Any]:
    """A hook for the registration of buffers: a new value for one of the module's goes into the tensor that it has."""
    modules = {id(module) for module in view.module.modules()}

    def hook(module: nn.Module, name: str, value: Any) -> Any:
        before = module._buffers.get(name)
        if id(module) not in modules or value is before or not isinstance(value, Tensor):
            return value
        with without_torch_function():  # our own looks at tensors are not the user's
            if before is None or not view.knows(before):
                return view.plain(value)
            view.set_data(before, value)
        return before

    return hook


def map_tensors(function: Callable[[GlobalTensor], Any], structure: Any) -> Any:
    """``structure`` with ``function`` applied to its global tensors; the same object if there are none."""
    if not any_leaf(lambda leaf: isinstance(leaf, GlobalTensor), structure):
        return structure

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, GlobalTensor):
            return function(leaf)
        return leaf

    return map_leaves(mapped, structure)


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
            self._share_draws(call, facts)
            return call.function(*call.args, **call.kwargs)
        self.view.note_operation(facts.name, found)
        if call.function in WITHOUT_MARKS:  # memory does not tell the mark: values that are sent would lose it
            unmarked = call._replace(function=WITHOUT_MARKS[call.function])
            return self._at_home(unmarked, found, facts)
        if facts.changes_shape:
            raise GlobalViewError(
                f"{facts.name} at {user_location()} changes the shape of {found[0].describe()} in place, which a "
                "pipeline cannot do for a tensor of another rank. Make a new tensor instead."
            )
        if facts.is_foreach and _is_mixed(call):
            return self._each(call)
        if facts.name in _TOLD:
            return self._told(call, found)
        # What is written says where it is done: a plain tensor is one of every rank's, so all of them write it.
        has_global = False
        has_plain = False
        for written in facts.written(call.args, call.kwargs):
            if isinstance(written, GlobalTensor):
                has_global = True
            elif isinstance(written, Tensor):
                has_plain = True
        if has_plain and has_global:
            raise GlobalViewError(
                f"{facts.name} at {user_location()} writes a tensor of one rank and a tensor of all ranks at once."
            )
        if has_plain or not facts.makes_tensors or facts.name in _DRAW_BY_VALUE:
            return self._everywhere(call, found, facts)
        return self._at_home(call, found, facts)

    def _share_draws(self, call: Call, facts: OperatorFacts) -> None:
        """Before an operator that draws from torch's default generators: these are the first rank's on all ranks."""
        if facts.draws and call.kwargs.get("generator") is None:
            self.view.share_random_state()

    # ---- at one rank ----

    def _at_home(self, call: Call, found: Sequence[GlobalTensor], facts: OperatorFacts) -> Any:
        """The home of what is written, or of what is read, does it; the other ranks get a result without values."""
        all_written = facts.written(call.args, call.kwargs)
        written = [tensor for tensor in all_written if isinstance(tensor, GlobalTensor)]
        home = _home_of(written or found)
        shapes: Any = None
        if not facts.only_writes:
            try:
                # Every rank works the result's shape out on the meta device, so that ranks without values have the same
                # tensor in hand without a message. Where that fails, all of them do the operation on fetched values.
                shapes = _on_meta(call)
            except Exception:
                # The shape depends on values, or there is no such kernel, or it is the user's error.
                return self._everywhere(call, found, facts)
        copies = self._fetch_from_others(found, home)
        self._share_draws(call, facts)
        real = None
        if self.view.rank == home:
            real = _with_locals(call, copies)
        elif facts.draws:  # every rank's generator goes on alike
            call.run(self._something_to_draw_by)
        for tensor in written:
            self.view.note_write(tensor)
        if facts.only_writes:
            return _in_order_of_returns(facts, written)
        result = self._wrap(shapes, real, home, found)
        if home != self.view.rank and not facts.draws and not written:
            _keep_recipe(result, call, found)
        return result

    def _fetch_from_others(self, found: Sequence[GlobalTensor], home: int) -> dict[int, Tensor]:
        """By id, the values of those that are not at ``home``. Collective if there are any."""
        elsewhere = [tensor for tensor in found if tensor.home != home]
        if not elsewhere:
            return {}
        return self._fetch(elsewhere)

    def _fetch(self, tensors: Sequence[GlobalTensor]) -> dict[int, Tensor]:
        """By id, the values of ``tensors``."""
        ids = [id(tensor) for tensor in tensors]
        values = self.view.fetch(tensors)
        return dict(zip(ids, values, strict=True))

    def _something_to_draw_by(self, leaf: Any) -> Any:
        """In place of values of another rank: ones, which are valid as a probability, a weight and a deviation."""
        if isinstance(leaf, GlobalTensor):
            return torch.ones(leaf.shape, dtype=leaf.dtype, device=self.view.device)
        return leaf

    def _wrap(self, shapes: Any, real: Any, home: int, found: Sequence[GlobalTensor]) -> Any:
        """Global tensors for the tensors in ``shapes``; ``real`` has their values, on the home."""
        if isinstance(shapes, (tuple, list)):
            members = [None] * len(shapes) if real is None else real
            wrapped = []
            for shape, member in zip(shapes, members, strict=True):
                wrapped.append(self._wrap(shape, member, home, found))
            return type(shapes)(wrapped)
        if not isinstance(shapes, Tensor):
            return shapes
        for tensor in found:
            if tensor.meta is shapes:
                return tensor
        memory = _memory_of(shapes, found)
        if memory is None:
            memory = Memory()
            # Ranks without values go by the strides of the meta tensor, which a kernel need not have kept to.
            if real is not None and real.stride() != shapes.stride():
                laid_out = torch.empty_strided(
                    shapes.shape,
                    shapes.stride(),
                    dtype=shapes.dtype,
                    device=real.device,
                )
                real = laid_out.copy_(real)
        return GlobalTensor(self.view, home, shapes, real, memory)

    # ---- at every rank ----

    def _everywhere(self, call: Call, found: Sequence[GlobalTensor], facts: OperatorFacts) -> Any:
        """All ranks fetch what they lack, and do it."""
        copies = self._fetch(found)
        self._share_draws(call, facts)

        def fetched(leaf: Any) -> Any:
            if isinstance(leaf, GlobalTensor):
                return copies[id(leaf)]
            return leaf

        return call.run(fetched)

    def _told(self, call: Call, found: Sequence[GlobalTensor]) -> Any:
        """One rank does it, and tells the others the result, which is no tensor. Collective."""
        home = _home_of(found)
        copies = self._fetch_from_others(found, home)
        value = None
        if self.view.rank == home:
            value = _with_locals(call, copies)
        return self.view.tell(value, home, call.function)

    # ---- lists of tensors ----

    def _each(self, call: Call) -> Any:
        """A ``_foreach_`` operator whose tensors are on several ranks: once for each of these."""
        first = _first_list(call)
        count = len(first)
        places: dict[int | None, list[int]] = {}
        for index, tensor in enumerate(first):
            places.setdefault(_rank_of(tensor), []).append(index)
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
        if returned is None:
            return None
        return results


def _memory_of(shapes: Tensor, found: Sequence[GlobalTensor]) -> Memory | None:
    """The memory of the tensor in ``found`` that ``shapes``, on the meta device, is a view of; None if it is none."""
    # The meta tensors of a view and of what it shows have one storage, as the real ones have.
    key = storage_key(shapes)
    for tensor in found:
        if storage_key(tensor.meta) == key:
            return tensor.memory
    return None


def _on_meta(call: Call) -> Any:
    """The result on the meta device: shapes, strides and types."""
    args = map_arguments(_meta, call.args)
    kwargs = map_arguments(_meta_keyword, call.kwargs)
    return call.function(*args, **kwargs)


def _with_locals(call: Call, copies: dict[int, Tensor]) -> Any:
    """The result on the home: with the values that are here, and ``copies`` of those from other ranks."""

    def here(leaf: Any) -> Any:
        if not isinstance(leaf, GlobalTensor):
            return leaf
        return copies.get(id(leaf), leaf.local)

    return call.run(here)


def _keep_recipe(result: Any, call: Call, found: Sequence[GlobalTensor]) -> None:
    """Note how ``result`` was made, on a rank that does not have it, unless that would keep a large tensor alive."""
    if not isinstance(result, GlobalTensor):
        return
    for leaf in call.leaves():
        is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, GlobalTensor)
        if is_plain and leaf.numel() > _SMALL:
            return
    versions = tuple(tensor.memory.version for tensor in found)
    result.recipe = Recipe(call, versions)


def _home_of(tensors: Sequence[GlobalTensor]) -> int:
    """Where an operation on ``tensors`` is done: with the parameters, as they are used again; else with most bytes."""
    candidates = [tensor for tensor in tensors if tensor.memory.leaf is not None] or tensors
    sizes: dict[int, int] = defaultdict(int)
    for tensor in candidates:
        sizes[tensor.home] += tensor.numel() * tensor.dtype.itemsize
    return max(sizes, key=lambda home: (sizes[home], -home))


def _first_list(call: Call) -> Sequence[Any]:
    """The first list among the arguments, of which the others' places follow; empty if there is none."""
    for arg in call.args:
        if isinstance(arg, (list, tuple)):
            return arg
    return ()


def _is_mixed(call: Call) -> bool:
    """Whether the first list has tensors of different ranks."""
    ranks = {_rank_of(leaf) for leaf in _first_list(call)}
    return len(ranks) > 1


def _rank_of(leaf: Any) -> int | None:
    """The home of a global tensor; None for anything else, which every rank has."""
    if isinstance(leaf, GlobalTensor):
        return leaf.home
    return None


def _members(arg: Any, chosen: Sequence[int], count: int) -> Any:
    """The ``chosen`` ones of a list of ``count``; anything else as it is."""
    if isinstance(arg, (list, tuple)) and len(arg) == count:
        return [arg[index] for index in chosen]
    return arg


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, GlobalTensor):
        return leaf.meta
    if isinstance(leaf, Tensor):
        return leaf.to("meta")
    return leaf


def _meta_keyword(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return None
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return _meta(leaf)


def _in_order_of_returns(facts: OperatorFacts, written: list[GlobalTensor]) -> Any:
    if facts.num_returns == 0:
        return None
    if facts.num_returns == 1:
        return written[0]
    return tuple(written)
