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
import itertools
from collections.abc import Sequence

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


class SplitBackward:
    """One backward in two parts: :meth:`inputs`, then :meth:`weights`, each once.

    The nodes through which gradients reach an input are executed by the first part. Where such a node also leads to
    parameters, not through another one of them, the gradient that arrived there is kept, and the second part goes on
    from it. Without any input to serve (a first stage, frozen stages before this one) that does everything::

        output --- linear 2 --- relu --- linear 1 --- input     first part, right through
                       |                     |
                  weight, bias          weight, bias            second part, from each linear downwards
    """

    def __init__(self, roots: Roots, inputs: Sequence[Tensor]) -> None:
        self._roots = list(roots)
        self._inputs = list(inputs)
        # Where in the graph the gradients of some parameters start, and these parameters; mostly one layer's.
        self._parts: list[tuple[list[Node], list[Tensor]]] | None = None
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def inputs(self) -> list[Tensor | None]:
        """The gradients of the inputs, as :func:`backward` returns them."""
        inputs, self._inputs = self._inputs, []
        if not inputs or not self._roots:
            return [None] * len(inputs)
        to_inputs, parts = _survey(self._roots, inputs)
        roots = [root for root in self._roots if root[0].node in to_inputs]
        # Roots that lead to no input start in the second part. The other tensors are let go here: activations should
        # not live until a rank has time for it.
        self._roots = [root for root in self._roots if root[0].node not in to_inputs]
        starts = to_inputs.union(edge.node for edge, _ in self._roots)
        self._parts = []
        for nodes in parts:
            leaves = [node for node in nodes if type(node).__name__ == "AccumulateGrad" and node not in to_inputs]
            if leaves:
                parameters = [leaf.variable for leaf in leaves]  # type: ignore[attr-defined]
                self._parts.append(([node for node in nodes if node in starts], parameters))
        if not roots:
            return [None] * len(inputs)
        # A prehook is called with the gradients that have arrived at its node, summed over all ways to it.
        handles = [
            node.register_prehook(functools.partial(self._arrived.__setitem__, node))
            for node in to_inputs.intersection(itertools.chain(*(nodes for nodes, _ in self._parts)))
        ]
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
            for starts, parameters in self._parts:
                self._accumulate(starts, parameters)
        self._roots = []
        self._parts = []
        self._arrived.clear()

    def _accumulate(self, starts: Sequence[Node], parameters: Sequence[Tensor]) -> None:
        roots = [root for root in self._roots if root[0].node in starts]
        handles = []
        for node in starts:
            arrived = self._arrived.get(node)
            if arrived is None:
                continue
            roots += [(GradientEdge(node, output), given) for output, given in enumerate(arrived) if given is not None]
            # Between two nodes that one part starts at (a parameter used twice) the gradient would flow again, and
            # hooks on activations would change it again: what arrived the first time is all that counts.
            handles.append(node.register_prehook(lambda _, arrived=arrived: arrived))
        try:
            if roots:
                edges, gradients = zip(*roots, strict=True)
                torch.autograd.backward(edges, gradients, inputs=parameters, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()


def _survey(roots: Roots, inputs: Sequence[Tensor]) -> tuple[set[Node], list[list[Node]]]:
    """The nodes that lead to ``inputs``; and all nodes, in the parts into which the graph falls below those.

    Nodes are in one part where one leads to the other and that one to no input: gradients flow through it once.
    """
    to_inputs = {get_gradient_edge(leaf).node for leaf in inputs}
    part_of: dict[Node, list[Node]] = {}
    # In autograd's graph a node's children (`next_functions`) are where its gradients flow to. Children come first, so
    # both questions about a node (does it lead to an input? with which others is it?) are answered by its children's.
    for node in _children_first([edge.node for edge, _ in roots]):
        children = {child for child, _ in node.next_functions if child is not None}
        if not children.isdisjoint(to_inputs):
            to_inputs.add(node)
        part = part_of[node] = [node]
        for child in children - to_inputs:
            if part_of[child] is not part:
                smaller, part = sorted([part, part_of[child]], key=len)
                part += smaller
                part_of.update(dict.fromkeys(smaller, part))
    return to_inputs, list({id(part): part for part in part_of.values()}.values())


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
