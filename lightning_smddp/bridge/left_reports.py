"""Messages by which ranks tell each other what their stages have left in attributes, and what is made of them.

A report is JSON: tensors are in it by path, shape and dtype alone. They stay where they are, and every rank makes a
:class:`~lightning_smddp.pipeline.view.tensor.GlobalTensor` of each, in the same order, as these are numbered.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp.bridge.left_notes import StepNotes, Wanted
from lightning_smddp.bridge.owner_watch import path_from_json, path_to_json
from lightning_smddp.bridge.step_attributes import AttrPath
from lightning_smddp.pipeline.view.global_view import GlobalView
from lightning_smddp.pipeline.view.tensor import GlobalTensor, Memory
from lightning_smddp.wire.encode import UnknownTypeError, decode, dtype_of, encode, name_of_dtype

Place: TypeAlias = tuple[str, AttrPath]  # the name of an owner, and a path in its attributes
Tensors: TypeAlias = dict[tuple[str, ...], Tensor]  # by path in a value


@dataclass(frozen=True)
class _Offer:
    """A value that a stage has, as ``encode`` gives it, with path, shape and dtype of each tensor."""

    stage: int
    rank: int
    grows: bool
    plain: Any
    specs: list[Any]


@dataclass(frozen=True)
class Shared:
    """A value that all ranks have: the same everywhere, but for ``tensors``, each of which is on one rank."""

    grows: bool
    plain: Any
    tensors: Tensors

    def value(self) -> Any:
        """The value, with its tensors."""
        return decode(self.plain, self.tensors)


def report(notes: StepNotes, last_stage: int, root: nn.Module) -> dict[str, Any]:
    """What this rank's stages have, and what the last one would like to have, as JSON."""
    doubt = notes.doubt()
    if doubt is not None:
        return {"doubt": doubt, "offers": [], "wanted": [], "held": []}
    # offers:  owner, path, stage, whether a list gains the value, the value as `encode` gives it, specs of its tensors
    # wanted:  owner, path, whether a list gains the value, the value, path and number of each tensor in it
    # held:    number, stage, spec of the tensor
    # A spec is a path in the value, a shape and a dtype.
    offers: dict[Place, list[Any]] = {}
    wanted: dict[Place, list[Any]] = {}
    for stage, name in notes.places():
        for where, (grows, value) in notes.of_stage(stage, name).items():
            found: Tensors = {}
            try:
                plain = encode(value, found)
            except UnknownTypeError:
                wanted[name, where] = [grows, None, []]
                continue
            specs = [_spec(path, tensor) for path, tensor in found.items()]
            offers[name, where] = [stage, grows, plain, specs]
        if stage == last_stage:
            for where, want in notes.wanted(stage, name).items():
                wanted[name, where] = [want.grows, want.plain, want.values]
    held = [[number, stage, _spec((), tensor)] for number, stage, tensor in notes.held()]
    return {"doubt": None, "offers": _keyed(offers, root), "wanted": _keyed(wanted, root), "held": held}


class Reports:
    """What the reports of all ranks say together.

    A value that the last stage names only by numbers of traced values is built of what other stages hold. Else the
    value of the latest stage that has left one is taken, as in one process the latest assignment stays.

    Args:
        reports: of all ranks of the pipeline, in their order.
        root: the LightningModule.
        notes: of this rank's stages.
        view: in which tensors are made.
    """

    def __init__(self, reports: Sequence[Any], root: nn.Module, notes: StepNotes, view: GlobalView) -> None:
        self.notes = notes
        self.view = view
        self._offers: dict[Place, list[_Offer]] = defaultdict(list)
        self._wanted: dict[Place, Wanted] = {}
        self._held: dict[int, _Offer] = {}  # by number
        for rank, of_rank in enumerate(reports):
            for name, keys, stage, *rest in of_rank["offers"]:
                place = (name, path_from_json(keys, root))
                self._offers[place].append(_Offer(stage, rank, *rest))
            for name, keys, *rest in of_rank["wanted"]:
                place = (name, path_from_json(keys, root))
                self._wanted[place] = Wanted(*rest)
            for number, stage, spec in of_rank["held"]:
                self._held[number] = _Offer(stage, rank, False, None, [spec])

    def places(self) -> list[Place]:
        """Where something was left, in the same order on all ranks."""
        return list(dict.fromkeys([*self._offers, *self._wanted]))

    def share(self, name: str, where: AttrPath) -> Shared | None:
        """What was left there; None where no stage has kept a tensor of it. On all ranks alike."""
        want = self._wanted.get((name, where))
        if want is not None:
            return self._of_held(want, where)
        offers = self._offers[name, where]
        chosen = max(offers, key=operator.attrgetter("stage"))
        return self._of_offer(chosen, name, where)

    def _of_offer(self, chosen: _Offer, name: str, where: AttrPath) -> Shared:
        # The rank that has made the offer combines the value once more, for its tensors; the others have none.
        local: Tensors = {}
        if chosen.rank == self.view.rank:
            _, value = self.notes.of_stage(chosen.stage, name)[where]
            encode(value, local)
        made: Tensors = {}
        for spec in chosen.specs:
            path = tuple(spec[0])
            made[path] = self._global(chosen.rank, spec, local.get(path))
        return Shared(chosen.grows, chosen.plain, made)

    def _of_held(self, want: Wanted, where: AttrPath) -> Shared | None:
        # Where nobody holds a value that is in it, all ranks know: then the attribute raises where a hook uses it.
        if want.plain is None or any(number not in self._held for _, number in want.values):
            return None
        made: Tensors = {}
        for path, number in want.values:
            source = self._held[number]
            local = None
            if source.rank == self.view.rank:
                local = self.notes.held_as(source.stage, number, where)
            made[tuple(path)] = self._global(source.rank, source.specs[0], local)
        return Shared(want.grows, want.plain, made)

    def _global(self, home: int, spec: Sequence[Any], local: Tensor | None) -> GlobalTensor:
        """A tensor that is on the rank ``home``, where ``local`` has its values."""
        _, shape, dtype = spec
        with torch.inference_mode(False):  # it stays when a validation is over
            pattern = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
            values = None
            if local is not None:
                values = local.detach().clone(memory_format=torch.contiguous_format)
            return GlobalTensor(self.view, home, pattern, values, Memory())


def _spec(path: Sequence[str], tensor: Tensor) -> list[Any]:
    return [list(path), list(tensor.shape), name_of_dtype(tensor.dtype)]


def _keyed(found: dict[Place, list[Any]], root: nn.Module) -> list[list[Any]]:
    """Values with their places before them, but for places that have no name."""
    keyed = []
    for (name, where), rest in found.items():
        keys = path_to_json(where, root)
        if keys is not None:
            keyed.append([name, keys, *rest])
    return keyed
