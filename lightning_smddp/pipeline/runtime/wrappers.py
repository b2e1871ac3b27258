"""The modules whose calls a pipeline's steps go through: units, and modules that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.patches import patched_forwards
from lightning_smddp.pipeline.runtime.remote_tensor import active_run
from lightning_smddp.seeding import Generators, seeded

Forward: TypeAlias = Callable[..., Any]


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
            sees_apply = any(graph.calls_apply for graph in graphs)
            with patched_forwards(self.root, self._wrap, names, compiled=True, sees_apply=sees_apply):
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
