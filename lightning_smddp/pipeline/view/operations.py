"""Where an operation on global tensors is done, and what its result is on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_smddp._compat.torch import WITHOUT_MARKS, OperatorFacts, operator_facts, storage_key
from lightning_smddp.pipeline.capture.patches import user_location
from lightning_smddp.pipeline.view.tensor import (
    GlobalTensor,
    GlobalViewError,
    Memory,
    Recipe,
    View,
    globals_in,
    map_arguments,
)

# How many numbers they draw depends on the values that they are given: every rank has to do them.
_DRAW_BY_VALUE = {"aten::poisson", "aten::binomial", "aten::_standard_gamma", "aten::_sample_dirichlet"}
# Tensors of several elements in, one Python value out: it is told, so that the tensors need not be sent.
_TOLD = {"aten::equal", "aten::_fused_sdp_choice"}
_SMALL = 64  # elements of a tensor that a recipe may keep alive


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
                function, tuple(part(arg) for arg in args), {key: part(value) for key, value in kwargs.items()}
            )
            if returned is not None:
                for index, value in zip(chosen, returned, strict=True):
                    results[index] = value
        return None if returned is None else results


def _call_with_locals(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], copies: dict[int, Tensor]
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
