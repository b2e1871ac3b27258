"""What is around few runs of a stage: where units do not see enough, and in dry runs.

Both function modes take the :class:`~lightning_smddp.pipeline.runtime.step_run.StageRun` that they are around.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_smddp.pipeline.capture.graph import Node
from lightning_smddp.pipeline.capture.ops import Kind, kind_of, name_of, user_location
from lightning_smddp.pipeline.capture.records import deciding_tensors
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.pytree import leaves, map_leaves


class Watch(TorchFunctionMode):
    """For the few stages that send what no unit sees."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, run = kwargs or {}, self.run
        if run.inside or run.done or kind_of(function, args) is not Kind.OPERATION:
            return function(*args, **kwargs)
        if run.has_begun:
            args, kwargs = map_leaves(run.real, args), map_leaves(run.real, kwargs)
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(run.is_remote, given)):
            return function(*args, **kwargs)  # comes to the class
        node = self._node_of(function, given)
        if node is None:
            return function(*args, **kwargs)
        if node.index < run.plan.begin and node.buffers:
            return run.placeholder(node, leaves((args, kwargs)))  # written on the stage that has it
        result = run.do(function, args, kwargs)
        if node.index >= run.plan.begin:
            run.position = node.index + 1
        if node.free:
            return result
        run.note_result(node, result)
        run.note_writes(node, leaves((args, kwargs)))
        return result

    def _node_of(self, function: Any, given: list[Tensor]) -> Node | None:
        """The next node that this call is; None for one that was not traced."""
        run = self.run
        values = _known(given, {id(tensor): value for value, tensor in run.here.items()})
        parameters, buffers = _known(given, run.program.names), _known(given, run.program.buffers)
        if not values and not parameters and not buffers:
            return None
        for index in range(run.position, run.graph.next_unit[run.position]):
            node: Node = run.graph.nodes[index]
            if node.function != function or not buffers.issubset(node.buffers + node.buffers_read):
                continue
            if values == set(node.inputs) and parameters == set(node.parameters):
                return node
        return None


def _known(tensors: list[Tensor], by_id: dict[int, Any]) -> set[Any]:
    return {by_id[id(tensor)] for tensor in tensors if id(tensor) in by_id}


class Reads(TorchFunctionMode):
    """Takes down what Python code reads of the batch in a dry run: another path may follow from other values."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, run = kwargs or {}, self.run
        result = function(*args, **kwargs)
        if run.inside or kind_of(function, args) is not Kind.OPERATION:
            return result
        reads = run.reads
        given, found = leaves((args, kwargs)), leaves(result)
        name, made = name_of(function), [leaf for leaf in found if isinstance(leaf, Tensor)]
        if not made and result is not None:
            reads.append(f"{result!r}, which Python reads at {user_location()}")
            return result
        # Sizes that follow from values: of masks, and where the step draws, of its own numbers.
        masks = [leaf for leaf in deciding_tensors(name, given) if type(leaf) is not RemoteTensor]
        sizes = [str(leaf) for leaf in given if isinstance(leaf, (int, slice))] if run.graph.draws else []
        if masks or (sizes and any(type(leaf) is RemoteTensor for leaf in found)):
            shapes = [tuple(tensor.shape) for tensor in made if type(tensor) is not RemoteTensor]
            reads.append(f"{name}{sizes}{[_summary(mask) for mask in masks]}{shapes} at {user_location()}")
        return result


def _summary(deciding: Tensor) -> list[int | float]:
    """What sizes follow from: how many entries of a mask are set; the sum, and the largest, of lengths and repeats."""
    if deciding.dtype is torch.bool or not deciding.numel():
        return [int(deciding.count_nonzero())]
    return [deciding.sum().item(), deciding.max().item()]
