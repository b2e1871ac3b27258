"""Ranks that ask for values alone, as code under ``if trainer.is_global_zero:`` does, and those that serve them.

The others are elsewhere, or at the hook's end already, and have not made what the asking rank has made of their
parameters. They send the parameters, gradients and buffers that it was made of, and the asking rank does the operations
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.pipeline.view.agreement import Agreement, Ask, SharedRandomState
from lightning_smddp.pipeline.view.leaves import GRADIENT, Leaf, Leaves, ViewGradients
from lightning_smddp.pipeline.view.tensor import GlobalTensor, View
from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.stream import Spec, broadcast_tensors


class Requests:
    """Asks for, and serves, values of single ranks."""

    def __init__(
        self,
        view: View,
        leaves: Leaves,
        gradients: ViewGradients,
        random: SharedRandomState,
        agreement: Agreement,
    ) -> None:
        self.view = view
        self.leaves = leaves
        self.gradients = gradients
        self.random = random
        self.agreement = agreement

    def serve(self, ask: Ask, ranks: Sequence[int]) -> None:
        """Take part in what ``ranks`` ask for, which do not include this one. Collective."""
        if ask is Ask.GRADIENTS:
            self.gradients.announce()
        elif ask is Ask.RANDOM:
            self.random.send()
        else:
            self.exchange(ranks, None)

    def refuse(self, ranks: Sequence[int], what: str) -> None:
        """Say on all ranks that ``ranks`` cannot do ``what`` alone. Collective."""
        problem = _alone(what, self.view.rank)
        broadcast_json({"problem": problem}, self.view.group, self.view.device, ranks[0])
        self.agreement.tell(problem)

    def exchange(self, ranks: Sequence[int], wanted: Sequence[GlobalTensor] | None) -> None:
        """Get the values of ``wanted``, which ``ranks`` alone ask for. Collective.

        Args:
            ranks: not all of them, ascending.
            wanted: the same on these; None on the others, which serve.
        """
        view = self.view
        request: dict[str, Any] = {}
        if wanted is not None:
            request = self._request(wanted)
        # The rank that asks says what it needs, by name and version, and all ranks look whether they can give it. They
        # tell each other before anything is sent, so that a refusal is an error everywhere and no rank waits for
        # values:
        #     rank 1 alone wants a + b   asks for a (version 0), grad:b (version 2)
        #     homes of a and b           broadcast a, then grad:b, to all
        #     rank 1                     does a + b again; the others throw the two away
        request = broadcast_json(request, view.group, view.device, ranks[0])
        problem = request.get("problem")
        if problem is None:
            problem = self._outdated(request["versions"], ranks[0], request["place"])
        self.agreement.tell(problem)
        received: dict[str, Tensor] = {}
        for name in request["versions"]:
            received[name] = self._send(name)
        if wanted is None:
            return
        for tensor in wanted:
            values = self._make(tensor, received)
            view.keep_copy(tensor, _in_memory_order(tensor, values))

    def _request(self, wanted: Sequence[GlobalTensor]) -> dict[str, Any]:
        versions: dict[str, int] = {}
        for tensor in wanted:
            problem = self._collect(tensor, versions)
            if problem is not None:
                return {"problem": problem}
        return {"versions": versions, "place": user_location()}

    def _collect(self, tensor: GlobalTensor, versions: dict[str, int]) -> str | None:
        """Note what ``tensor`` is made of; or say why it cannot be made here."""
        if tensor.local is not None:
            return None
        if self._is_leaf(tensor):
            assert tensor.memory.leaf is not None
            versions[tensor.memory.leaf] = tensor.memory.version
            return None
        recipe = tensor.recipe
        is_overwritten = tensor.memory.leaf is None and tensor.memory.version > 0
        if recipe is None or is_overwritten:
            return _alone(f"{tensor.describe()} at {user_location()}", self.view.rank)
        # The operation can be done again only with what it was given: another version of that has other values. What it
        # wrote itself (the same memory) has a later version by that.
        for given, version in zip(recipe.call.global_tensors(), recipe.versions, strict=True):
            if given.memory is not tensor.memory and given.memory.version != version:
                what = f"{tensor.describe()} at {user_location()}, made of {given.describe()} as it was before"
                return _alone(what, self.view.rank)
            problem = self._collect(given, versions)
            if problem is not None:
                return problem
        return None

    def _is_leaf(self, tensor: GlobalTensor) -> bool:
        name = tensor.memory.leaf
        return name is not None and tensor.recipe is None

    def _outdated(self, versions: dict[str, int], asking: int, place: str) -> str | None:
        """Why this rank does not have what the rank ``asking`` needs at ``place``."""
        for name, version in versions.items():
            leaf = self.leaves.by_name.get(name.removeprefix(GRADIENT))
            if leaf is None:
                return _alone(f"{name} at {place}", asking)
            if leaf.home == self.view.rank and self._version_of(leaf, name) != version:
                return _alone(f"{name} at {place}, as it was before other ranks changed it", asking)
        return None

    def _version_of(self, leaf: Leaf, name: str) -> int | None:
        """Of a parameter, buffer or gradient of this rank; None for a gradient that was replaced."""
        if not name.startswith(GRADIENT):
            return leaf.memory.version
        if not self.gradients.loaded:
            return 0
        gradient: Tensor | None = None
        if leaf.shown is not None:
            gradient = leaf.shown.grad
        if not isinstance(gradient, GlobalTensor) or gradient.memory.leaf != name:
            return None
        return gradient.memory.version

    def _send(self, name: str) -> Tensor:
        """A parameter, buffer or gradient, contiguous. Collective."""
        view = self.view
        leaf = self.leaves.by_name[name.removeprefix(GRADIENT)]
        values = torch.empty(leaf.tensor.shape, dtype=leaf.tensor.dtype, device=view.device)
        if leaf.home == view.rank:
            source: Tensor | None = leaf.tensor
            if name.startswith(GRADIENT):
                source = leaf.tensor.grad
            if source is None:
                values.zero_()
            else:
                values = source.detach().contiguous()
        broadcast_tensors([Spec.of(values)], [values], view.group, leaf.home, view.device)
        return values

    def _make(self, tensor: GlobalTensor, received: dict[str, Tensor]) -> Tensor:
        """The values of ``tensor``: those that are here, those received, or what its recipe makes of such."""
        if tensor.local is not None:
            return tensor.local
        if self._is_leaf(tensor):
            assert tensor.memory.leaf is not None
            return received[tensor.memory.leaf]
        recipe = tensor.recipe
        assert recipe is not None

        def made(leaf: Any) -> Any:
            if isinstance(leaf, GlobalTensor):
                return self._make(leaf, received)
            return leaf

        result: Tensor = recipe.call.run(made)
        return result


def _alone(what: str, rank: int) -> str:
    return (
        f"Rank {rank} of the pipeline alone needs {what}, which the others did not make: they do not run this code. "
        "Run it on all ranks, and only print or write files under `if trainer.is_global_zero:`."
    )


def _in_memory_order(tensor: GlobalTensor, values: Tensor) -> Tensor:
    """``values`` as a copy of the memory of ``tensor`` lies, or just contiguous if it shows a part of it."""
    if not tensor.is_whole:
        return values.contiguous()
    laid_out = torch.empty_strided(
        tensor.shape,
        tensor.meta.stride(),
        dtype=values.dtype,
        device=values.device,
    )
    laid_out.copy_(values)
    return laid_out.as_strided((laid_out.numel(),), (1,), 0)
