"""The modules whose calls a pipeline's steps go through: units, and modules that draw random numbers.

While steps run, ``forward`` of each such module is replaced on the module object. The replacement asks
``remote_tensor.ACTIVE`` for this thread's run of a stage and calls its ``unit``, which runs the module, stands in
for it or leaves the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_smddp._compat.torch import visible_autograd_functions
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.runtime.remote_tensor import ACTIVE
from lightning_smddp.seeding import Forward, Generators, forward_patches, seeded


class Wrappers:
    """The wrapped modules of one root: units, and modules that draw random numbers.

    Outside of :meth:`active` modules are what they always are.

    Attributes:
        drawing: names of the modules that draw, or are called behind draws.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.root = root
        self.device = device
        self.generators = Generators(root, device)
        self.drawing: frozenset[str] = frozenset()
        self._compiled: frozenset[str] = frozenset()  # units of graphs with compiled code between units

    @contextmanager
    def active(self, graphs: Sequence[StepGraph]) -> Iterator[None]:
        """Around forward and backward of steps on the paths ``graphs``."""
        self.drawing = frozenset[str]().union(*(graph.drawing for graph in graphs))
        self._compiled = frozenset[str]().union(*(graph.unit_names for graph in graphs if graph.calls_compiled))
        names = self.drawing.union(*(graph.unit_names for graph in graphs))
        # Made anew each time: another module may be there, or one that has another forward.
        patches = forward_patches(self.root, self._wrap, names)
        apply = visible_autograd_functions(_apply) if any(graph.calls_apply for graph in graphs) else nullcontext()
        self.generators.python = any(graph.draws for graph in graphs)
        try:
            with apply, patched(patches):
                yield
        finally:
            self.generators.python = True

    def _wrap(self, name: str, forward: Forward) -> Forward:
        if name in self._compiled:
            forward = torch.compiler.set_stance("default")(forward)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            run = ACTIVE.run
            if run is not None and not run.inside and name in run.graph.unit_names:
                return run.unit(name, forward, args, kwargs)
            if name in self.drawing:  # also in a checkpoint's second run, which no run is for
                return seeded(self.generators, lambda: forward(*args, **kwargs))
            return forward(*args, **kwargs)

        return wrapped


def _apply(cls: Any, apply: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``apply`` of an ``autograd.Function``, which takes no part in torch function."""
    run = ACTIVE.run
    return apply(*args, **kwargs) if run is None else run.autograd_function(cls, apply, args, kwargs)
