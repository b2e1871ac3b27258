"""The state of an optimizer as hooks see it: of all parameters, each where its parameter is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp.pipeline.view.agreement import Ask
from lightning_smddp.pipeline.view.global_view import GlobalView
from lightning_smddp.pipeline.view.leaves import Leaf
from lightning_smddp.pipeline.view.tensor import GlobalTensor, Memory
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.stream import Spec

_PLAIN = (bool, int, float, str, type(None))


class ShownState(defaultdict[Any, Any]):
    """Stands for ``optimizer.state`` in a hook. The first look at it is collective.

    Args:
        view: of the module.
        real: of this rank's parameters.
    """

    def __init__(self, view: GlobalView, real: defaultdict[Any, Any]) -> None:
        super().__init__(dict)
        self.view = view
        self.real = real
        self.loaded = False

    def load(self) -> None:
        """Fill it with what all ranks have of the state, as global tensors. Collective the first time."""
        if self.loaded:
            return
        self.loaded = True
        what = "the state of an optimizer"
        agreed = self.view.agreement.meet(Ask.VALUES, what)
        if len(agreed.ranks) < self.view.group.size():
            self.view.requests.refuse(agreed.ranks, what)
        # Each home tells what the state of its parameters looks like, so that all ranks can make stand-ins for it.
        leaves = self.view.leaves.by_name
        local: dict[str, Any] = {}
        for name, leaf in leaves.items():
            if leaf.home == self.view.rank and leaf.tensor in self.real:
                local[name] = _described(self.real[leaf.tensor])
        found: dict[str, Any] = {}
        for part in gather_json(local, self.view.group, self.view.device):
            found.update(part)
        for name, leaf in leaves.items():
            if name in found:
                shown = self._shown(leaf, found[name])
                super().__setitem__(leaf.tensor, shown)

    def _shown(self, leaf: Leaf, described: dict[str, Any]) -> dict[str, Any]:
        """The state of ``leaf`` as its home has ``described`` it, with global tensors."""
        shown: dict[str, Any] = {}
        for key, fact in described.items():
            if "value" in fact:
                shown[key] = fact["value"]
                continue
            spec = Spec.from_json(fact["tensor"])
            meta = torch.empty_strided(spec.shape, fact["stride"], dtype=spec.dtype, device="meta")
            local: Tensor | None = None
            if leaf.home == self.view.rank:
                local = self.real[leaf.tensor][key].detach()
            shown[key] = GlobalTensor(self.view, leaf.home, meta, local, Memory())
        return shown

    def write_back(self) -> None:
        """The state of this rank's parameters becomes what the hook has left. Collective if some has to be sent."""
        if not self.loaded:
            return
        for leaf in self.view.leaves.by_name.values():
            shown = super().get(leaf.tensor)
            if shown is None:
                continue
            # What a hook has put there may be on another rank than the parameter: all ranks fetch that.
            away = [v for v in shown.values() if isinstance(v, GlobalTensor) and v.home != leaf.home]
            fetched = self.view.fetch(away)
            copies = {id(value): copy for value, copy in zip(away, fetched, strict=True)}
            if self.view.rank in leaf.holders:
                self._write(leaf, shown, copies)

    def _write(self, leaf: Leaf, shown: dict[str, Any], copies: dict[int, Tensor]) -> None:
        """The real state of ``leaf``, which this rank holds, becomes ``shown``; ``copies`` are from other ranks."""
        own = self.real[leaf.tensor]
        # Code may have put a tensor of another parameter, one of its own, or a number there, or changed what there was
        # in place: then the memory is the same, and nothing is left to do.
        for key, value in shown.items():
            if isinstance(value, GlobalTensor):
                if id(value) in copies:
                    own[key] = copies[id(value)].clone()
                elif value.local is not None and not _is_same(own.get(key), value.local):
                    own[key] = value.local
            elif isinstance(value, Tensor):
                own[key] = value.detach().clone()
            else:
                own[key] = value

    # ---- every way to read loads the state of all ranks first ----

    @override
    def __contains__(self, key: object) -> bool:
        self.load()
        return super().__contains__(key)

    @override
    def __getitem__(self, key: Any) -> Any:
        self.load()
        return super().__getitem__(key)

    @override
    def __iter__(self) -> Iterator[Any]:
        self.load()
        return super().__iter__()

    @override
    def __len__(self) -> int:
        self.load()
        return super().__len__()

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        self.load()
        return super().get(key, default)

    @override
    def items(self) -> Any:
        self.load()
        return super().items()

    @override
    def values(self) -> Any:
        self.load()
        return super().values()


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as JSON: plain values, and what tensors look like; nothing else of it is shown."""
    described: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            described[key] = {"tensor": Spec.of(value).to_json(), "stride": list(value.stride())}
        elif isinstance(value, _PLAIN):
            described[key] = {"value": value}
    return described


def _is_same(before: Any, after: Tensor) -> bool:
    if not isinstance(before, Tensor):
        return False
    return before.data_ptr() == after.data_ptr() and before.shape == after.shape


@contextmanager
def shown_state(optimizer: Optimizer, view: GlobalView) -> Iterator[None]:
    """Within it ``optimizer.state`` is that of all ranks."""
    real = optimizer.state
    shown = ShownState(view, real)
    optimizer.state = shown
    try:
        yield
        shown.write_back()
    finally:
        optimizer.state = real


@contextmanager
def real_state(optimizer: Optimizer) -> Iterator[None]:
    """Within :func:`shown_state`: this rank's state again, up to date."""
    shown = optimizer.state
    if not isinstance(shown, ShownState):
        yield
        return
    shown.write_back()
    optimizer.state = shown.real
    # What runs now may change the real state: the next look at the shown one loads it anew.
    shown.clear()
    shown.loaded = False
    try:
        yield
    finally:
        optimizer.state = shown
