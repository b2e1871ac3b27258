"""Operations on global tensors: what hooks call above autograd, where an operation is done, and what each rank gets.

Above autograd parameters become what all ranks see, and values that leave torch are fetched.
"""

from __future__ import annotations

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
    GlobalTensor,
    GlobalViewError,
    Memory,
    Recipe,
    View,
    globals_in,
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
        name = name_of(function)
        # Some calls have a rule of their own; all others run on stand-ins, and their operators come to ViewOperations.
        # First, values that leave torch: they are fetched, and the function gets plain tensors.
        if name in _READERS:
            args, kwargs = self.view.plain((self.view.stand_in(args), self.view.stand_in(kwargs)))
            return function(*args, **kwargs)
        attribute = getattr(function, "__name__", None)
        # `.data`, `.grad` and `.requires_grad` of a parameter are those of its stand-in, too.
        if attribute in ("__set__", "__delete__"):
            return self._set(name, attribute, function, args)
        if name == "__deepcopy__":
            shown = self.view.stand_in(args[0])
            if isinstance(shown, GlobalTensor):
                return shown.__deepcopy__(args[1])
            return function(*args, **kwargs)
        if name == "requires_grad_" and self.view.knows(args[0]):
            return self._flag(args[0], function, args, kwargs)
        if name == "grad" and attribute == "__get__" and self.view.knows(args[0]):
            return self.view.gradient(args[0])
        # What needs no values (a shape, a hook for gradients, which fires where the parameter is): the module's own.
        kind = kind_of(function, args)
        if kind is Kind.WATCHER or (kind is Kind.METADATA and not asks_for_device(name)):
            return function(*args, **kwargs)
        within: AbstractContextManager[Any] = nullcontext()
        if kind is Kind.BACKWARD:
            within = mode_within_backwards(self)
        with within:
            result = function(*self.view.stand_in(args), **self.view.stand_in(kwargs))
        if isinstance(result, GlobalTensor):  # in-place operations give the user's own object back
            return self.view.own_object(result)
        return result

    def _set(self, name: str, attribute: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
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
        result = function(*args, **kwargs)
        self.view.stand_in_for(parameter).requires_grad_(parameter.requires_grad)
        return result


class ViewOperations(DispatchMode):
    """Sees the operators that those calls come to, also in backward passes."""

    def __init__(self, view: View) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.view = view

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.view.run_operator(function, tuple(args), dict(kwargs or {}))


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

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one operator call, on this rank."""
        found = globals_in((args, kwargs))
        facts = operator_facts(function)
        if not found:
            if facts.draws and not _own_generator(kwargs):
                self.view.share_random_state()
            return function(*args, **kwargs)
        self.view.note_operation(facts.name, found)
        if function in WITHOUT_MARKS:  # memory does not tell the mark: values that are sent would lose it
            return self._at_home(WITHOUT_MARKS[function], args, kwargs, found, facts)
        if facts.changes_shape:
            raise GlobalViewError(
                f"{facts.name} at {user_location()} changes the shape of {found[0].describe()} in place, which a "
                "pipeline cannot do for a tensor of another rank. Make a new tensor instead."
            )
        written = facts.written(args, kwargs)
        if facts.is_foreach and _is_mixed(args):
            return self._each(function, args, kwargs)
        if facts.name in _TOLD:
            return self._told(function, args, kwargs, found)
        is_everywhere = any(isinstance(t, Tensor) and not isinstance(t, GlobalTensor) for t in written)
        if is_everywhere and any(isinstance(t, GlobalTensor) for t in written):
            raise GlobalViewError(
                f"{facts.name} at {user_location()} writes a tensor of one rank and a tensor of all ranks at once."
            )
        if is_everywhere or not facts.makes_tensors or facts.name in _DRAW_BY_VALUE:
            return self._everywhere(function, args, kwargs, found, facts)
        return self._at_home(function, args, kwargs, found, facts)

    # ---- at one rank ----

    def _at_home(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Sequence[GlobalTensor],
        facts: OperatorFacts,
    ) -> Any:
        written = [t for t in facts.written(args, kwargs) if isinstance(t, GlobalTensor)]
        home = _home_of(written or found)
        shapes: Any = None
        if not facts.only_writes:
            try:
                # Every rank works the result's shape out on the meta device, so that ranks without values have the same
                # tensor in hand without a message. Where that fails, all of them do the operation on fetched values.
                shapes = function(*map_arguments(_meta, args), **map_arguments(_meta_keyword, kwargs))
            except (
                Exception
            ):  # the result's shape depends on values, or there is no such kernel, or it is the user's error
                return self._everywhere(function, args, kwargs, found, facts)
        copies = self._fetch_from_others(found, home)
        if facts.draws and not _own_generator(kwargs):
            self.view.share_random_state()

        real = None
        if self.view.rank == home:
            real = _call_with_locals(function, args, kwargs, copies)
        elif facts.draws:  # every rank's generator goes on alike

            def stand_in(leaf: Any) -> Any:
                return self._ones(leaf) if isinstance(leaf, GlobalTensor) else leaf

            function(*map_arguments(stand_in, args), **map_arguments(stand_in, kwargs))
        for tensor in written:
            self.view.note_write(tensor)
        if facts.only_writes:
            return _in_order_of_returns(facts, written)
        result = self._wrap(shapes, real, home, found)
        if home != self.view.rank and not facts.draws and not written:
            self._keep_recipe(result, function, args, kwargs, found)
        return result

    def _fetch_from_others(self, found: Sequence[GlobalTensor], home: int) -> dict[int, Tensor]:
        elsewhere = [tensor for tensor in found if tensor.home != home]
        if not elsewhere:
            return {}
        return {id(t): copy for t, copy in zip(elsewhere, self.view.fetch(elsewhere), strict=True)}

    def _ones(self, tensor: GlobalTensor) -> Tensor:
        """Something to draw by: valid as a probability, a weight and a deviation."""
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=self.view.device)

    def _wrap(self, shapes: Any, real: Any, home: int, found: Sequence[GlobalTensor]) -> Any:
        """Global tensors for the tensors in ``shapes``; ``real`` has their values, on the home."""
        if isinstance(shapes, (tuple, list)):
            members = [None] * len(shapes) if real is None else real
            return type(shapes)(
                [self._wrap(shape, member, home, found) for shape, member in zip(shapes, members, strict=True)]
            )
        if not isinstance(shapes, Tensor):
            return shapes
        for tensor in found:
            if tensor.meta is shapes:
                return tensor
        key = storage_key(shapes)
        # A view, by the meta tensors: those of a view and of what it shows have one storage, as the real ones have.
        shared = next((t.memory for t in found if storage_key(t.meta) == key), None)
        if real is not None and shared is None and real.stride() != shapes.stride():
            laid_out = torch.empty_strided(shapes.shape, shapes.stride(), dtype=shapes.dtype, device=real.device)
            real = laid_out.copy_(real)
        return GlobalTensor(self.view, home, shapes, real, shared or Memory())

    @staticmethod
    def _keep_recipe(
        result: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Sequence[GlobalTensor],
    ) -> None:
        if not isinstance(result, GlobalTensor):
            return
        large = [False]

        def look(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and not isinstance(leaf, GlobalTensor) and leaf.numel() > _SMALL:
                large[0] = True
            return leaf

        map_arguments(look, (args, kwargs))
        if not large[0]:
            result.recipe = Recipe(function, args, kwargs, tuple(tensor.memory.version for tensor in found))

    # ---- at every rank ----

    def _everywhere(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Sequence[GlobalTensor],
        facts: OperatorFacts,
    ) -> Any:
        """All ranks fetch what they lack, and do it."""
        copies = {id(t): copy for t, copy in zip(found, self.view.fetch(found), strict=True)}
        if facts.draws and not _own_generator(kwargs):
            self.view.share_random_state()

        def fetched(leaf: Any) -> Any:
            return copies[id(leaf)] if isinstance(leaf, GlobalTensor) else leaf

        return function(*map_arguments(fetched, args), **map_arguments(fetched, kwargs))

    def _told(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Sequence[GlobalTensor],
    ) -> Any:
        home = _home_of(found)
        copies = self._fetch_from_others(found, home)

        value = None
        if self.view.rank == home:
            value = _call_with_locals(function, args, kwargs, copies)
        return self.view.tell(value, home, function)

    # ---- lists of tensors ----

    def _each(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A ``_foreach_`` operator whose tensors are on several ranks: once for each of these."""
        first = next(arg for arg in args if isinstance(arg, (list, tuple)))
        count = len(first)
        places: dict[int | None, list[int]] = {}
        for index, tensor in enumerate(first):
            home = tensor.home if isinstance(tensor, GlobalTensor) else None
            places.setdefault(home, []).append(index)
        results: list[Any] = [None] * count
        returned: Any = None
        for chosen in places.values():

            def part(arg: Any, chosen: list[int] = chosen) -> Any:
                if isinstance(arg, (list, tuple)) and len(arg) == count:
                    return [arg[index] for index in chosen]
                return arg

            returned = self.run(
                function,
                tuple(part(arg) for arg in args),
                {key: part(value) for key, value in kwargs.items()},
            )
            if returned is not None:
                for index, value in zip(chosen, returned, strict=True):
                    results[index] = value
        return None if returned is None else results


def _call_with_locals(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    copies: dict[int, Tensor],
) -> Any:
    """On the home: with the values that are here, and ``copies`` of those from other ranks."""

    def here(leaf: Any) -> Any:
        if not isinstance(leaf, GlobalTensor):
            return leaf
        return copies.get(id(leaf), leaf.local)

    return function(*map_arguments(here, args), **map_arguments(here, kwargs))


def _home_of(tensors: Sequence[GlobalTensor]) -> int:
    """Where an operation on ``tensors`` is done: with the parameters, as they are used again; else with most bytes."""
    candidates = [tensor for tensor in tensors if tensor.memory.leaf is not None] or tensors
    sizes: dict[int, int] = {}
    for tensor in candidates:
        sizes[tensor.home] = sizes.get(tensor.home, 0) + tensor.numel() * tensor.dtype.itemsize
    return max(sizes, key=lambda home: (sizes[home], -home))


def _is_mixed(args: tuple[Any, ...]) -> bool:
    """Whether the first list, of which the others' places follow, has tensors of different ranks."""
    first = next((arg for arg in args if isinstance(arg, (list, tuple))), ())
    return len({leaf.home if isinstance(leaf, GlobalTensor) else None for leaf in first}) > 1


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, GlobalTensor):
        return leaf.meta
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _meta_keyword(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return None
    return torch.device("meta") if isinstance(leaf, torch.device) else _meta(leaf)


def _own_generator(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("generator") is not None


def _in_order_of_returns(facts: OperatorFacts, written: list[GlobalTensor]) -> Any:
    if facts.num_returns == 0:
        return None
    return written[0] if facts.num_returns == 1 else tuple(written)
