"""What has to cross each cut: the fewest bytes from which everything later can be computed.

The natural choice, all values made before the cut and used after it, is often not the smallest: a mask may be small
before it is expanded, and the terms of a sum are many where the sum is one. Operations between units are cheap, so a
later stage may repeat them. The smallest set is a minimum vertex cut in the graph of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx  # type: ignore[import-untyped]

from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph


def natural_bytes(program: StepGraph, cut: int) -> int:
    """Bytes of the values made before item ``cut`` and used after: an upper bound of the live set's."""
    return sum(program.values[v].nbytes for v in program.needed_after(cut))


def live_sets(program: StepGraph, cuts: Sequence[int]) -> tuple[list[tuple[int, ...]], list[frozenset[int]]]:
    """For each cut the values that cross it, and for each stage the earlier items that it does again.

    A stage can send on only what it has: what it received, what it made, and what it computed again from these.

    Args:
        program: the step.
        cuts: first items of all stages but the first, ascending.

    Returns:
        ``live[i]`` crosses ``cuts[i]``; ``again[s]`` are the items before stage s that it repeats (none for the first).

    Raises:
        SplitError: a cut is where none may be (:meth:`StepGraph.cuts`).
    """
    for cut in cuts:
        if obstacle := program.obstacle_to(cut):
            raise SplitError(f"No stage may begin with {program.items[cut].name}: {obstacle}.")
    live: list[tuple[int, ...]] = []
    again: list[frozenset[int]] = [frozenset()]
    received: tuple[int, ...] = ()
    for cut in cuts:
        received = _minimum(program, cut, received)
        live.append(received)
        again.append(_repeated(program, cut, received))
    # what a stage only passes on needs no repetition, but what it sends may
    for stage, sent in enumerate(live[1:], start=1):
        wanted = [v for v in sent if program.producers[v] < cuts[stage - 1] and v not in live[stage - 1]]
        again[stage] |= _closure(program, wanted, set(live[stage - 1]), cuts[stage - 1])
    return live, again


def _minimum(program: StepGraph, cut: int, received: tuple[int, ...]) -> tuple[int, ...]:
    needed = program.needed_after(cut)
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for value in needed:
        graph.add_edge((value, "out"), "sink")  # no capacity: unlimited
    pending, seen = list(needed), set(needed)
    while pending:
        value = pending.pop()
        if program.overwritten.get(value, cut) >= cut:
            # equal bytes: rather the later value, which spares the next stage the work
            weight = program.values[value].nbytes * len(program.values) + len(program.values) - value
            graph.add_edge((value, "in"), (value, "out"), capacity=weight)
        else:
            graph.add_edge((value, "in"), (value, "out"))  # its memory holds another value by now
        item = program.items[program.producers[value]]
        if value in received or not item.recomputable:
            graph.add_edge("source", (value, "in"))
            continue
        for used in item.inputs:
            graph.add_edge((used, "out"), (value, "in"))
            if used not in seen:
                seen.add(used)
                pending.append(used)
    if not needed:
        return ()
    _, (_, right) = nx.minimum_cut(graph, "source", "sink")
    return tuple(sorted(v for v in seen if (v, "out") in right and (v, "in") not in right))


def _repeated(program: StepGraph, cut: int, received: tuple[int, ...]) -> frozenset[int]:
    return _closure(program, program.needed_after(cut), set(received), cut)


def _closure(program: StepGraph, wanted: Sequence[int], given: set[int], cut: int) -> frozenset[int]:
    """Items before ``cut`` that compute ``wanted`` from ``given``."""
    pending, repeated = [v for v in wanted if v not in given], set()
    while pending:
        item = program.items[program.producers[pending.pop()]]
        if item.index not in repeated and item.index < cut:
            assert item.recomputable, f"{item.name} cannot be repeated"
            repeated.add(item.index)
            pending += [v for v in item.inputs if v not in given]
    return frozenset(repeated)
