"""The modules whose calls a pipeline's steps go through: units, and modules that draw random numbers.

While steps run, ``forward`` of each such module is replaced on the module object. The replacement asks
``remote_tensor.ACTIVE`` for this thread's run of a stage and calls its ``unit``, which runs the module, stands in
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
from lightning_smddp.pipeline.runtime.remote_tensor import ACTIVE
from lightning_smddp.pipeline.runtime.run_modes import with_stance
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
        self._graphs: list[StepGraph] = []
        self._compiled: frozenset[str] = frozenset()  # units of graphs with compiled code between units
        self._patches: list[Patch] = []  # for these graphs
        self._modules: list[nn.Module] = []  # that they wrap
        self._places: list[tuple[nn.Module, str]] = []  # (parent, attribute) on the way to these modules
        self._found: list[Any] = []  # what was there when they were made

    @contextmanager
    def active(self, graphs: Sequence[StepGraph]) -> Iterator[None]:
        """Around forward and backward of steps on the paths ``graphs``."""
        if list(map(id, graphs)) != list(map(id, self._graphs)) or self._find() != self._found:
            self._wrap_for(graphs)
        apply = visible_autograd_functions(_apply) if any(graph.calls_apply for graph in graphs) else nullcontext()
        self.generators.python = any(graph.draws for graph in graphs)
        try:
            with apply, patched(self._patches):
                yield
        finally:
            self.generators.python = True

    def _wrap_for(self, graphs: Sequence[StepGraph]) -> None:
        self.drawing = frozenset[str]().union(*(graph.drawing for graph in graphs))
        names = self.drawing.union(*(graph.unit_names for graph in graphs))
        self._compiled = frozenset[str]().union(*(graph.unit_names for graph in graphs if graph.calls_compiled))
        self._patches = forward_patches(self.root, self._wrap, names)
        self._modules = list(map(self.root.get_submodule, names))
        self._places = []
        for path in {path for name in names for path in accumulate(name.split("."), "{}.{}".format)}:
            parent, _, attribute = path.rpartition(".")
            self._places.append((self.root.get_submodule(parent), attribute))
        self._found = self._find()
        self._graphs = list(graphs)

    def _find(self) -> list[Any]:
        """The modules that are wrapped, their own ``forward`` and that of their class.

        Another function from one step to the next is another forward. What a compiled module calls depends on its
        hooks: it never is as it was.
        """
        found = [getattr(parent, attribute, None) for parent, attribute in self._places]
        for module in self._modules:
            attributes = vars(module)
            found += [attributes.get("forward"), getattr(type(module), "forward", None)]
            if attributes.get(COMPILED_CALL) is not None:
                found.append(object())
        return found

    def _wrap(self, name: str, forward: Forward) -> Forward:
        if name in self._compiled:
            forward = with_stance("default", forward)

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
