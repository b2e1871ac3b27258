"""What has to cross each cut: the fewest bytes from which everything later can be computed.

The natural choice, all values made before the cut and used after it, is often not the smallest: a mask may be small
before it is expanded, and the terms of a sum are many where the sum is one. Operations between units are cheap, so a
later stage may repeat them. The smallest set is a minimum vertex cut in the graph of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import networkx as nx  # type: ignore[import-untyped]

from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph

Values: TypeAlias = tuple[int, ...]
"""Indices of values, ascending."""


def natural_bytes(graph: StepGraph, cut: int) -> int:
    """Bytes of the values made before node ``cut`` and used after: an upper bound of the live set's."""
    total = 0
    for value in graph.needed_after(cut):
        total += graph.values[value].nbytes
    return total


def live_sets(graph: StepGraph, cuts: Sequence[int]) -> tuple[list[Values], list[frozenset[int]]]:
    """For each cut the values that cross it, and for each stage the earlier nodes that it does again.

    A stage can send on only what it has: what it received, what it made, and what it computed again from these.

    Args:
        graph: the step.
        cuts: first nodes of all stages but the first, ascending.

    Returns:
        ``live[i]`` crosses ``cuts[i]``; ``again[s]`` are the nodes before stage s that it repeats (none for the first).

    Raises:
        SplitError: a cut is where none may be (:meth:`StepGraph.cuts`).
    """
    for cut in cuts:
        obstacle = graph.obstacle_to(cut)
        if obstacle is not None:
            name = graph.nodes[cut].name
            raise SplitError(f"No stage may begin with {name}: {obstacle}.")
    live: list[Values] = []
    again: list[frozenset[int]] = [frozenset()]
    received: Values = ()
    for cut in cuts:
        needed = graph.needed_after(cut)
        received = _minimum(graph, cut, needed, received)
        live.append(received)
        again.append(_closure(graph, needed, received, cut))
    # What a stage only passes on needs no repetition, but what it sends may: values from before its own first node
    # that it did not receive.
    for stage in range(1, len(cuts)):
        begin = cuts[stage - 1]
        received = live[stage - 1]
        sent_from_before = [value for value in live[stage] if graph.producers[value] < begin]
        again[stage] |= _closure(graph, sent_from_before, received, begin)
    return live, again


def _minimum(graph: StepGraph, cut: int, needed: Sequence[int], received: Values) -> Values:
    """The cheapest values to send over ``cut``, of those that the stage before received or can make.

    Each value is an edge ``in -> out`` whose capacity is its bytes. Flow comes from the source into what the stage has
    anyway, runs from a node's inputs to its outputs where the node can be done again, and ends in what is needed behind
    the cut. The edges of a minimum cut are what is sent::

        source -> (x in) -x bytes-> (x out) -> (y in) -y bytes-> (y out) -> sink     y = f(x) is needed
    """
    if not needed:
        return ()
    flow = nx.DiGraph()
    flow.add_nodes_from(("source", "sink"))
    for value in needed:
        flow.add_edge((value, "out"), "sink")  # no capacity: unlimited
    # From what is needed back to what it was made of, as far as nodes can be done again.
    count = len(graph.values)
    pending = list(needed)
    seen = set(needed)
    while pending:
        value = pending.pop()
        entry = (value, "in")
        overwritten_at = graph.overwritten.get(value, cut)
        if overwritten_at >= cut:
            # Equal bytes: rather the later value, which spares the next stage the work. Bytes count so many times that
            # what is added for this is one byte at most.
            capacity = graph.values[value].nbytes * count + (count - value)
            flow.add_edge(entry, (value, "out"), capacity=capacity)
        else:
            flow.add_edge(entry, (value, "out"))  # unlimited, so it is not cut: its memory holds another value by now
        node = graph.nodes[graph.producers[value]]
        if value in received or not node.recomputable:
            flow.add_edge("source", entry)
            continue
        for used in node.inputs:
            flow.add_edge((used, "out"), entry)
            if used not in seen:
                seen.add(used)
                pending.append(used)
    _, (before, _) = nx.minimum_cut(flow, "source", "sink")
    sent = []
    for value in sorted(seen):
        is_cut = (value, "in") in before and (value, "out") not in before
        if is_cut:
            sent.append(value)
    return tuple(sent)


def _closure(
    graph: StepGraph,
    wanted: Sequence[int],
    given: Sequence[int],
    cut: int,
) -> frozenset[int]:
    """Nodes before ``cut`` that compute ``wanted`` from ``given``."""
    known = set(given)
    repeated = set()
    pending = list(wanted)
    while pending:
        value = pending.pop()
        if value in known:
            continue
        node = graph.nodes[graph.producers[value]]
        if node.index in repeated or node.index >= cut:
            continue
        assert node.recomputable, f"{node.name} cannot be repeated"
        repeated.add(node.index)
        pending += node.inputs
    return frozenset(repeated)
