"""Where a stage may begin, and what crosses to it: what the stages before can see, and no other can make again.

A stage begins at a unit. It is sent what units before it have returned or were given (its operations between units are
seen by nobody else), as far as it needs that; what is made of smaller values that cross is made again instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from lightning_smddp._compat.torch import BackwardHook
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.ops import is_autograd_function

Values: TypeAlias = tuple[int, ...]
"""Indices of values, ascending."""

# They take values out of tensors, and torch function does not see it where these are another stage's.
_ESCAPES = {"tensor", "nested_tensor", "__dlpack__", "from_dlpack", "full", "full_like", "new_full", "new_tensor"}


def starts_of_stages(graph: StepGraph) -> list[int]:
    """The nodes that a stage could begin with: units, or the hooks just before them."""
    found = []
    for node in graph.nodes[1:]:
        if node.module is None:
            continue
        # torch's full backward hooks take hold of a module's inputs just before it.
        before = graph.nodes[node.index - 1]
        is_hook = is_autograd_function(before.function) and before.function.__self__ is BackwardHook
        is_hooked = is_hook and any(one.first == before.index for one in graph.colocations)
        start = before.index if is_hooked else node.index
        if start > 0:
            found.append(start)
    return found


def possible_cuts(graph: StepGraph) -> list[int]:
    """The nodes that a stage may begin with."""
    if graph.possible_cuts is None:
        graph.possible_cuts = [cut for cut in starts_of_stages(graph) if obstacle_to(graph, cut) is None]
    return graph.possible_cuts


def obstacle_to(graph: StepGraph, cut: int) -> str | None:
    """Why no stage may begin with node ``cut``; None if one may."""
    if cut not in starts_of_stages(graph):
        return "a stage begins at a module that is placed whole: put this code into a module"
    for found in graph.colocations:
        if found.first < cut <= found.last:
            return found.reason
    node, before = graph.nodes[cut], graph.nodes[cut - 1]
    if node.region is not None and before.region == node.region:
        return "it is inside of a region that `torch.utils.checkpoint` runs again"
    for node in graph.nodes[:cut]:
        if node.function is not None and node.name.split(" ")[0] in _ESCAPES and node.inputs:
            return f"{node.name} takes numbers out of a tensor, which only the stage that has it can do"
        if node.reads and node.parameters:
            return f"{node.name} reads a parameter's value into Python, which only the stage that has it can do"
    for value in graph.needed_after(cut):
        maker = graph.nodes[graph.producers[value]]
        if maker.varies:
            return f"{maker.name} makes a tensor whose size depends on values that a module made"
        if maker.module is None and maker.buffers_read:
            return f"{maker.name} reads a buffer that the step changes, which one stage alone has"
    try:
        boundary_values(graph, [cut])
    except SplitError as error:
        return str(error)
    return None


def boundary_values(graph: StepGraph, cuts: Sequence[int]) -> tuple[list[Values], list[frozenset[int]]]:
    """For each cut the values that cross it, and for each stage the earlier nodes that it does again.

    Args:
        graph: the step.
        cuts: first nodes of all stages but the first, ascending.

    Raises:
        SplitError: something that is needed behind a cut can neither be sent nor be made again.
    """
    crossing: list[Values] = [()]
    for cut in cuts:
        crossing.append(_fewest(graph, cut, crossing[-1]))
    crossing.append(())
    again = []
    for stage, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(graph.nodes)], strict=True)):
        again.append(_recomputed(graph, begin, end, crossing[stage], crossing[stage + 1]))
    return crossing[1:-1], again


def boundary_bytes(graph: StepGraph, cut: int) -> int:
    """Bytes that cross ``cut`` if it is the only one."""
    (sent,), _ = boundary_values(graph, [cut])
    return nbytes(graph, sent)


def nbytes(graph: StepGraph, values: Iterable[int]) -> int:
    """Bytes of some values together."""
    return sum(graph.values[value].nbytes for value in values)


def seen_before(graph: StepGraph, cut: int) -> set[int]:
    """The values that units before ``cut`` show, returned by or given to them; also what that of ``cut`` is given."""
    seen: set[int | None] = set()
    for node in graph.nodes[:cut]:
        if node.module is not None:
            seen.update(node.outputs, node.entry)
            seen.discard(None)
        seen.update(new for old, new, _ in node.rebinds if old in seen)  # the same object, written in place
    for node in graph.nodes[cut : cut + 1]:
        seen.update(node.entry if node.module is not None else node.inputs)
    return {value for value in seen if value is not None}


def _fewest(graph: StepGraph, cut: int, received: Values) -> Values:
    """The values that cross ``cut``; what no unit sees counts, too, if fewer bytes cross so."""
    choices: list[tuple[int, Values]] = []
    error: SplitError | None = None
    for sees_all in (False, True):
        try:
            values = _needed(graph, cut, received, sees_all)
        except SplitError as failure:
            error = failure
            continue
        choices.append((nbytes(graph, values), values))
    if error is not None and not choices:
        raise error
    return min(choices, key=lambda choice: choice[0])[1]


def _needed(graph: StepGraph, cut: int, received: Values, sees_all: bool) -> Values:
    seen = seen_before(graph, cut)
    if sees_all:
        for node in graph.nodes[:cut]:
            seen.update(node.outputs)
    seen = {v for v in seen if graph.overwritten.get(v, cut) >= cut and graph.values[v].sendable}
    found: set[int] = set()
    pending = _wanted(graph, cut, len(graph.nodes))
    looked_at: set[int] = set()
    while pending:
        value = pending.pop()
        if value in looked_at:
            continue
        looked_at.add(value)
        node = graph.nodes[graph.producers[value]]
        if node.free:  # every stage has it
            continue
        may_repeat = node.recomputable and value not in received
        is_larger = nbytes(graph, node.inputs) <= graph.values[value].nbytes and seen.issuperset(node.inputs)
        if value in seen and not (may_repeat and is_larger):
            found.add(value)
        elif may_repeat:
            pending.update(node.inputs)
        elif not graph.values[value].sendable:
            raise SplitError(f"the sparse or nested result of {node.name} cannot be sent")
        else:
            raise SplitError(
                f"what {node.name} makes is used behind it, and no module before it returns or takes that: put this "
                "code into a module"
            )
    return tuple(sorted(found))


def _wanted(graph: StepGraph, begin: int, end: int) -> set[int]:
    """Values from before ``begin`` that nodes up to ``end`` use, that the step returns, and that Python reads again."""
    used = set(graph.returned)
    for node in graph.nodes[:end]:
        if node.index >= begin or node.reads:
            used.update(node.inputs)
    return {value for value in used if graph.producers.get(value, begin) < begin}


def _recomputed(graph: StepGraph, begin: int, end: int, received: Values, sends: Values) -> frozenset[int]:
    """Nodes before ``begin`` that a stage does again, for itself, for what it sends, and where Python reads."""
    if begin == 0:
        return frozenset()
    again = {node.index for node in graph.nodes[:begin] if node.reads and node.inputs and node.module is None}
    pending = _wanted(graph, begin, end)
    pending.update(value for value in sends if graph.producers[value] < begin)
    while pending:
        value = pending.pop()
        node = graph.nodes[graph.producers[value]]
        if value in received or node.index in again or node.free:
            continue
        if not node.recomputable:
            raise SplitError(f"what {node.name} makes is needed by a later stage, and is not sent to it")
        again.add(node.index)
        pending.update(node.inputs)
    return frozenset(again)
