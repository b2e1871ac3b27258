"""Where a stage may begin, and what crosses to it: what it needs of the stages before, and cannot make again.

A stage begins at a unit. What is made of values that are no larger is made again from these instead of being sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_smddp.pipeline.capture.graph import Node, SplitError, StepGraph
from lightning_smddp.pipeline.capture.ops import is_autograd_function
from lightning_smddp.pipeline.capture.records import Values, each_once

# They take values out of tensors, and torch function does not see it where these are another stage's.
_ESCAPES = {"tensor", "nested_tensor", "__dlpack__", "from_dlpack", "full", "full_like", "new_full", "new_tensor"}


def starts_of_stages(graph: StepGraph) -> list[int]:
    """The nodes that a stage could begin with: units."""
    return [node.index for node in graph.nodes[1:] if node.module is not None]


def possible_cuts(graph: StepGraph) -> list[int]:
    """The nodes that a stage may begin with."""
    if graph.possible_cuts is None:
        graph.possible_cuts = [cut for cut in starts_of_stages(graph) if reason_not_to_cut(graph, cut) is None]
    return graph.possible_cuts


def reason_not_to_cut(graph: StepGraph, cut: int) -> str | None:
    """Why no stage may begin with node ``cut``, one of :func:`starts_of_stages`; None if one may."""
    for found in graph.colocations:
        if found.first < cut <= found.last:
            return found.reason
    region = graph.nodes[cut].region
    if region is not None and graph.nodes[cut - 1].region == region:
        return "it is inside of a region that `torch.utils.checkpoint` runs again"
    for node in graph.nodes[:cut]:
        if node.function is not None and node.name.split(" ")[0] in _ESCAPES and node.inputs:
            return f"{node.name} takes numbers out of a tensor, which only the stage that has it can do"
        if node.reads and node.parameters:
            return f"{node.name} reads a parameter's value into Python, which only the stage that has it can do"
    needed = graph.needed_after(cut)
    for value in needed:
        maker = graph.nodes[graph.producers[value]]
        if maker.varies:
            return f"{maker.name} makes a tensor whose size depends on values that a module made"
    later = set(needed)
    for node in _of_buffers(graph, cut):
        if node.reads or not later.isdisjoint(node.outputs):
            return f"{node.name} uses a buffer that the step changes, which one stage alone has"
    try:
        cut_into_stages(graph, [cut])
    except SplitError as error:
        return str(error)
    return None


def _of_buffers(graph: StepGraph, cut: int) -> list[Node]:
    """What is done before ``cut`` with buffers that the step changes, and what a stage behind would make of that."""
    found: list[Node] = []
    own, stale = set[int](), set[int]()  # values that the stage would make itself, and those of old buffers
    for node in graph.nodes[:cut]:
        if node.module is not None:
            continue
        is_own = own.issuperset(node.inputs)
        own.update(node.outputs if is_own else ())
        if node.buffers_read or (is_own and not stale.isdisjoint(node.inputs)):
            stale.update(node.outputs)
            found.append(node)
    return found


@dataclass(frozen=True)
class StagePlan:
    """What a stage does: nodes ``[begin, end)``, and ``recomputed`` ones before; values that it receives and sends."""

    stage: int
    begin: int
    end: int
    recomputed: frozenset[int]
    receives: Values
    sends: Values


def cut_into_stages(graph: StepGraph, cuts: Sequence[int]) -> tuple[StagePlan, ...]:
    """The stages of ``graph`` if all but the first begin with the nodes ``cuts``, which ascend.

    Raises:
        SplitError: something that is needed behind a cut can neither be sent nor be made again.
    """
    crossing: list[Values] = [()]
    for cut in cuts:
        sent, _ = _sent_and_repeated(graph, cut, crossing[-1], _wanted(graph, cut, len(graph.nodes)))
        crossing.append(tuple(sorted(sent)))
    crossing.append(())
    stages = []
    for stage, (begin, end) in enumerate(pairwise([0, *cuts, len(graph.nodes)])):
        receives, sends = crossing[stage : stage + 2]
        needed = _wanted(graph, begin, end)
        needed.update(value for value in sends if graph.producers[value] < begin)
        _, repeated = _sent_and_repeated(graph, begin, receives, needed)
        # Where Python reads, it does so on each stage.
        repeated.update(node.index for node in graph.nodes[:begin] if node.reads and node.inputs)
        stages.append(StagePlan(stage, begin, end, frozenset(repeated), receives, sends))
    return tuple(stages)


def _sent_and_repeated(graph: StepGraph, cut: int, received: Values, needed: set[int]) -> tuple[set[int], set[int]]:
    """Which values cross ``cut``, and which nodes before it are done again, so that all ``needed`` ones are there.

    ``received``: what the stage before ``cut`` has itself received, which it sends on.
    """
    # Units show what they return and are given. What an operation between them makes is caught by a slower run, see
    # `run_modes.py`; what an autograd function makes is not.
    seen = seen_before(graph, cut)
    made = set(seen)
    for node in graph.nodes[:cut]:
        if not is_autograd_function(node.function):
            made.update(node.outputs)
    gone = {value for value in made if graph.overwritten.get(value, cut) < cut or not graph.values[value].sendable}
    seen -= gone
    made -= gone
    sent: set[int] = set()
    repeated: set[int] = set()
    pending = set(needed)
    looked_at: set[int] = set()
    while pending:
        value = pending.pop()
        node = graph.nodes[graph.producers[value]]
        if node.free or value in looked_at:  # every stage has what is free
            continue
        looked_at.add(value)
        may_repeat = node.recomputable and value not in received
        sources = seen if value in seen else made
        is_larger = graph.nbytes(node.inputs) <= graph.values[value].nbytes and sources.issuperset(node.inputs)
        if value in made and not (may_repeat and is_larger):
            sent.add(value)
        elif may_repeat:
            repeated.add(node.index)
            pending.update(node.inputs)
        else:
            raise SplitError(
                f"what {node.name} makes is used behind it and cannot be sent, as it is changed in place, is sparse or "
                "nested, or no module sees it: put this code into a module"
            )
    return sent, repeated


def _wanted(graph: StepGraph, begin: int, end: int) -> set[int]:
    """Values from before ``begin`` that nodes up to ``end`` use, that the step returns, and that Python reads again."""
    used = set(graph.returned)
    for node in graph.nodes[:end]:
        if node.index >= begin or node.reads:
            used.update(node.inputs)
    return {value for value in used if graph.producers.get(value, begin) < begin}


def seen_before(graph: StepGraph, cut: int) -> set[int]:
    """The values that units before ``cut`` show, returned by or given to them; also what that of ``cut`` is given."""
    seen: set[int] = set()
    for node in graph.nodes[:cut]:
        if node.module is not None:
            seen.update(node.outputs, each_once(node.entry))
        seen.update(new for old, new, _ in node.versions if old in seen)  # the same object, written in place
    for first in graph.nodes[cut : cut + 1]:
        seen.update(first.inputs if first.module is None else each_once(first.entry))
    return seen
