"""The modules whose calls a pipeline's steps go through: units, and modules that draw random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_smddp._compat.torch import visible_autograd_functions
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.runtime.remote_tensor import active_run
from lightning_smddp.seeding import Forward, Generators, seeded, wrapped_forwards


class Wrappers:
    """The wrapped modules of one root: units, and modules that draw random numbers.

    Attributes:
        drawing: names of the modules that draw, or are called behind draws.
        is_active: whether the steps of a pipeline run: outside of them modules are what they always are.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.root = root
        self.device = device
        self.generators = Generators(root, device)
        self.drawing: frozenset[str] = frozenset()
        self.is_active = False

    @contextmanager
    def active(self, graphs: Sequence[StepGraph]) -> Iterator[None]:
        """Around forward and backward of steps on the paths ``graphs``."""
        names: dict[str, None] = {}
        drawing: set[str] = set()
        for graph in graphs:
            names.update(dict.fromkeys(graph.units))
            drawing.update(graph.drawing)
        names.update(dict.fromkeys(drawing))
        self.drawing = frozenset(drawing)
        self.generators.python = any(graph.draws for graph in graphs)
        self.is_active = True
        try:
            apply = visible_autograd_functions() if any(graph.calls_apply for graph in graphs) else nullcontext()
            with apply, wrapped_forwards(self.root, self._wrap, list(names)):
                yield
        finally:
            self.is_active = False
            self.generators.python = True

    def _wrap(self, name: str, forward: Forward) -> Forward:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            run = active_run()
            if run is not None and not run.inside and name in run.graph.unit_names:
                return run.unit(name, forward, args, kwargs)
            if name in self.drawing and self.is_active:  # also in a checkpoint's second run, which no run is for
                return seeded(self.generators, lambda: forward(*args, **kwargs))
            return forward(*args, **kwargs)

        return wrapped
