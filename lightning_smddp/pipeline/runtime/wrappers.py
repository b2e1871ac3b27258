"""The modules whose calls a pipeline's steps go through: units, and modules that draw random numbers.

While steps run, ``forward`` of each such module is replaced on the module object. The replacement asks
``remote_tensor.active_run()`` for this thread's run of a stage and calls its ``unit``, which runs the module, stands in
for it or leaves the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from lightning_smddp._compat.torch import COMPILED_CALL, visible_autograd_functions
from lightning_smddp.patches import Patch, patched
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.runtime.remote_tensor import active_run
from lightning_smddp.seeding import Forward, Generators, forward_patches, seeded


class Wrappers:
    """The wrapped modules of one root: units, and modules that draw random numbers.

    Outside of :meth:`active` modules are what they always are. What wraps them is made once for a set of graphs.

    Attributes:
        drawing: names of the modules that draw, or are called behind draws.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.root = root
        self.device = device
        self.generators = Generators(root, device)
        self.drawing: frozenset[str] = frozenset()
        self._graphs: Sequence[StepGraph] = ()
        self._patches: list[Patch] = []  # for these graphs,
        self._forwards: list[tuple[nn.Module, Any]] = []  # what they wrap,
        self._places: list[tuple[nn.Module, str, nn.Module]] = []  # (parent, attribute, module) on the way to them

    @contextmanager
    def active(self, graphs: Sequence[StepGraph]) -> Iterator[None]:
        """Around forward and backward of steps on the paths ``graphs``."""
        if list(map(id, graphs)) != list(map(id, self._graphs)) or self._has_changed():
            self._graphs = graphs
            self.drawing = frozenset[str]().union(*(graph.drawing for graph in graphs))
            names = self.drawing.union(*(graph.unit_names for graph in graphs))
            self._patches = forward_patches(self.root, self._wrap, names)
            modules = list(map(self.root.get_submodule, names))
            self._forwards = [(module, _forward_of(module)) for module in modules]
            self._places = []
            for path in {path for name in names for path in accumulate(name.split("."), "{}.{}".format)}:
                parent, _, attribute = path.rpartition(".")
                place = (self.root.get_submodule(parent), attribute, self.root.get_submodule(path))
                self._places.append(place)
        apply = visible_autograd_functions() if any(graph.calls_apply for graph in graphs) else nullcontext()
        self.generators.python = any(graph.draws for graph in graphs)
        try:
            with apply, patched(self._patches):
                yield
        finally:
            self.generators.python = True

    def _has_changed(self) -> bool:
        """Whether one of the modules, or its ``forward``, is not what was wrapped, or is compiled."""
        if any(getattr(parent, attribute, None) is not module for parent, attribute, module in self._places):
            return True
        return any(
            _forward_of(module) != forward or vars(module).get(COMPILED_CALL) is not None
            for module, forward in self._forwards
        )

    def _wrap(self, name: str, forward: Forward) -> Forward:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            run = active_run()
            if run is not None and not run.inside and name in run.graph.unit_names:
                return run.unit(name, forward, args, kwargs)
            if name in self.drawing:  # also in a checkpoint's second run, which no run is for
                return seeded(self.generators, lambda: forward(*args, **kwargs))
            return forward(*args, **kwargs)

        return wrapped


def _forward_of(module: nn.Module) -> Any:
    """Its own, if it has one, and that of its class: another function from one step to the next is another forward."""
    return vars(module).get("forward"), getattr(type(module), "forward", None)
