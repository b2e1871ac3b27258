"""The backward of one stage for one micro-batch, whole or in two parts: inputs first, parameters later.

Zero-bubble schedules (arXiv:2401.10241) hand the gradients of a stage's inputs to the stage before at once (``I``) and
compute the gradients of its parameters when the rank would idle (``W``). Together the two do the work of one backward.

torch has functions for this in ``torch.distributed.pipelining._backward``. In 2.13 they leave out what a parameter
contributes to a stage's output on a way that no input joins (T5's position bias, which a later stage reuses), fail on a
parameter that is used twice in a stage, and on outputs that are views. Here both parts go through
``torch.autograd.backward``, so that hooks on parameters fire too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Roots = Sequence[tuple[GradientEdge, Tensor]]
"""The outputs of a stage, as edges of the autograd graph (they keep no activation alive), and their gradients."""


def backward(roots: Roots, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Accumulate the gradients of all parameters; return those of ``inputs`` (None: it does not matter to any root).

    Args:
        roots: May be empty, and may name one edge several times.
        inputs: Leaves that require a gradient and have none yet.
    """
    if roots:
        edges, root_gradients = zip(*roots, strict=True)
        torch.autograd.backward(edges, root_gradients)
    gradients = [leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    return gradients


@dataclass
class _Part:
    """Some of the parameters, and where in the graph their gradients start."""

    frontier: list[Node] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    roots: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)


class SplitBackward:
    """One backward in two parts: :meth:`inputs`, then :meth:`weights`, each once.

    The nodes through which gradients reach an input are executed by the first part. Where such a node also leads to
    parameters it is on the *frontier*: the gradient that arrived there is kept, and the second part goes on from it.
    Without any input to serve (a first stage, frozen stages before this one) the second part does everything::

        output --- linear 2 --- relu --- linear 1 --- input     first part, right through
                       |                     |
                  weight, bias          weight, bias            second part, from each linear (frontier) downwards
    """

    def __init__(self, roots: Roots, inputs: Sequence[Tensor]) -> None:
        self._roots = list(roots)
        self._inputs = list(inputs)
        self._parts: list[_Part] | None = None
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def inputs(self) -> list[Tensor | None]:
        """The gradients of the inputs, as :func:`backward` returns them."""
        if not self._inputs or not self._roots:
            return [None] * len(self._inputs)
        to_inputs, self._parts = _survey(self._roots, self._inputs)
        # Roots that lead to no input start in the second part. The tensors are let go here: what the second part needs
        # is in the parts, and activations should not live until a rank has time for it.
        roots = [root for root in self._roots if root[0].node in to_inputs]
        inputs = self._inputs
        self._roots = []
        self._inputs = []
        if not roots:
            return [None] * len(inputs)
        # A prehook is called with the gradients that have arrived at its node, summed over all ways to it.
        handles = []
        for part in self._parts:
            for node in part.frontier:
                keep = functools.partial(self._arrived.__setitem__, node)
                handles.append(node.register_prehook(keep))
        try:
            # The graph is kept for the second part; it goes when this object does.
            edges, gradients = zip(*roots, strict=True)
            return list(torch.autograd.grad(edges, inputs, gradients, retain_graph=True, allow_unused=True))
        finally:
            for handle in handles:
                handle.remove()

    def weights(self) -> None:
        """Accumulate the gradients of all parameters."""
        if self._parts is None:
            backward(self._roots, ())
        else:
            for part in self._parts:
                self._weights_of(part)
        self._roots = []
        self._parts = []
        self._arrived.clear()

    def _weights_of(self, part: _Part) -> None:
        roots = list(part.roots)
        handles = []
        for node in part.frontier:
            arrived = self._arrived.get(node, ())
            for output, gradient in enumerate(arrived):
                if gradient is not None:
                    roots.append((GradientEdge(node, output), gradient))
            # Between two nodes of one frontier (a parameter used twice) the gradient would flow again, and hooks on
            # activations would change it again: what arrived the first time is all that counts.
            handles.append(node.register_prehook(lambda _, arrived=arrived: arrived))
        try:
            if roots:
                edges, gradients = zip(*roots, strict=True)
                torch.autograd.backward(edges, gradients, inputs=part.leaves, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()


class _Union:
    """Union-find over the nodes of each part."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """The node that stands for the part of ``node``."""
        above = self.parent.setdefault(node, node)
        while above is not node:
            # Each node on the way is hung up one higher, so that later searches are shorter.
            higher = self.parent[above]
            self.parent[node] = higher
            node = higher
            above = self.parent[node]
        return node

    def merge(self, node: Node, into: Node) -> None:
        """Let both be in one part."""
        self.parent[self.find(node)] = self.find(into)


def _survey(roots: Roots, inputs: Sequence[Tensor]) -> tuple[set[Node], list[_Part]]:
    """The nodes that lead to ``inputs``, and the parts into which the rest of the graph falls.

    Two parameters are in one part when a node that leads to no input leads to both: their gradients have to flow
    through it together. Most parts are one layer's weight and bias.
    """
    to_inputs: set[Node] = set()
    to_leaves: set[Node] = set()
    leaves: dict[Node, Tensor] = {}
    union = _Union()
    input_nodes = {get_gradient_edge(leaf).node for leaf in inputs}
    # In autograd's graph a node's children (`next_functions`) are where its gradients flow to. Children come first, so
    # both questions about a node (does it lead to an input? to a parameter?) are answered by its children's answers.
    starts = [edge.node for edge, _ in roots]
    for node in _children_first(starts):
        children = [child for child, _ in node.next_functions if child is not None]
        if node in input_nodes or any(child in to_inputs for child in children):
            to_inputs.add(node)
        else:
            leaf = _leaf_of(node)
            if leaf is not None:
                leaves[union.find(node)] = leaf
                to_leaves.add(node)
        for child in children:
            if child not in to_leaves:
                continue
            to_leaves.add(node)
            # A child that leads to an input is a frontier of its own: its gradient is kept there, so what lies behind
            # it need not be computed together with what lies before it.
            if child not in to_inputs:
                union.merge(child, node)
    return to_inputs, _collect(roots, union, to_inputs, to_leaves, leaves)


def _collect(
    roots: Roots,
    union: _Union,
    to_inputs: set[Node],
    to_leaves: set[Node],
    leaves: Mapping[Node, Tensor],
) -> list[_Part]:
    """What :func:`_survey` has found, by part."""
    parts: dict[Node, _Part] = {}
    for node in union.parent:
        part = parts.setdefault(union.find(node), _Part())
        if node in to_inputs:
            part.frontier.append(node)
        elif node in leaves:
            part.leaves.append(leaves[node])
    for edge, gradient in roots:
        if edge.node not in to_inputs and edge.node in to_leaves:
            part = parts[union.find(edge.node)]
            part.roots.append((edge, gradient))
    return list(parts.values())


def _leaf_of(node: Node) -> Tensor | None:
    """The parameter whose gradient ``node`` accumulates; None for a node of any other kind."""
    if type(node).__name__ == "AccumulateGrad":
        return node.variable  # type: ignore[attr-defined, no-any-return]
    return None


def _children_first(starts: Sequence[Node]) -> list[Node]:
    """Every node reachable from ``starts``, each after all that it leads to."""
    # Depth first with a stack of our own, as graphs are deeper than Python's recursion limit. A node is pushed twice:
    # to push its children, and below them (True), to be written down after them.
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    stack.append((child, False))
    return order
