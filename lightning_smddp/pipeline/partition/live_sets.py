"""What crosses each cut: few bytes from which everything later can be computed.

The natural choice, all values made before the cut and used after it, is often not the smallest: a mask may be small
before it is expanded, and the terms of a sum are many where the sum is one. Operations between units are cheap, so a
later stage may repeat them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import TypeAlias

from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph

Values: TypeAlias = tuple[int, ...]
"""Indices of values, ascending."""


def unit_starts(graph: StepGraph) -> list[int]:
    """The nodes that a stage begins with: units, or the first of the nodes that have to be on a unit's stage."""
    allowed = set(graph.cuts())
    before = {found.first + 1 for found in graph.colocations}  # torch's hooks on a unit's inputs are just before it
    starts = []
    for node in graph.nodes:
        if node.module is None:
            continue
        if node.index in allowed:
            starts.append(node.index)
        elif node.index in before and node.index - 1 in allowed:
            starts.append(node.index - 1)
    return starts


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
    live: list[Values] = []
    again: list[frozenset[int]] = [frozenset()]
    received: Values = ()
    for cut in cuts:
        obstacle = graph.obstacle_to(cut)
        if obstacle is not None:
            raise SplitError(f"No stage may begin with {graph.nodes[cut].name}: {obstacle}.")
        received = boundary_values(graph, cut, received)
        live.append(received)
        again.append(_closure(graph, graph.needed_after(cut), received, cut))
    # What a stage only passes on needs no repetition, but what it sends may: values from before its own first node
    # that it did not receive.
    for stage in range(1, len(cuts)):
        begin = cuts[stage - 1]
        sent_from_before = [value for value in live[stage] if graph.producers[value] < begin]
        again[stage] |= _closure(graph, sent_from_before, live[stage - 1], begin)
    return live, again


def boundary_values(graph: StepGraph, cut: int, received: Collection[int] = ()) -> Values:
    """What is sent over ``cut`` by a stage that has ``received`` values: greedily, value by value.

    Of a value that is needed behind the cut either it is sent itself, or what it can be made of where that is smaller.
    """
    needed = graph.needed_after(cut)
    # What is needed, and what that is made of as far as nodes can be done again.
    made_of: dict[int, Values] = {}
    pending = list(needed)
    while pending:
        value = pending.pop()
        if value in made_of:
            continue
        node = graph.nodes[graph.producers[value]]
        may_repeat = node.recomputable and value not in received
        made_of[value] = node.inputs if may_repeat else ()
        pending += made_of[value]
    # Of each value, from the first one made on, the fewest bytes of values that give it, beside those that are sent
    # anyway; None: there are none, as its memory holds another value by now.
    best: dict[int, Set[int] | None] = {}
    sent: set[int] = set()
    for value in sorted(made_of):
        itself = {value} if graph.overwritten.get(value, cut) >= cut else None
        sources = [best[used] for used in made_of[value]]
        known = [source for source in sources if source is not None]
        others = set().union(*known) if sources and len(known) == len(sources) else None
        is_smaller = others is not None and (itself is None or nbytes(graph, others - sent) < nbytes(graph, itself))
        chosen = best[value] = others if is_smaller else itself
        if value in needed:
            assert chosen is not None, f"{graph.nodes[graph.producers[value]].name} was overwritten"
            sent |= chosen
    for value in sorted(sent, reverse=True):
        if value in _made_of(sent - {value}, made_of):  # of others, which cross anyway
            sent.remove(value)
    return tuple(sorted(sent))


def _made_of(given: Set[int], made_of: Mapping[int, Values]) -> set[int]:
    """``given`` values, and all that can be made of them."""
    known = set(given)
    for value in sorted(made_of):
        if made_of[value] and known.issuperset(made_of[value]):
            known.add(value)
    return known


def nbytes(graph: StepGraph, values: Collection[int]) -> int:
    """Bytes of some values together."""
    return sum(graph.values[value].nbytes for value in values)


def _closure(graph: StepGraph, wanted: Sequence[int], given: Sequence[int], cut: int) -> frozenset[int]:
    """Nodes before ``cut`` that compute ``wanted`` from ``given``."""
    repeated: set[int] = set()
    pending = list(wanted)
    while pending:
        value = pending.pop()
        node = graph.nodes[graph.producers[value]]
        if value in given or node.index in repeated or node.index >= cut:
            continue
        assert node.recomputable, f"{node.name} cannot be repeated"
        repeated.add(node.index)
        pending += node.inputs
    return frozenset(repeated)
