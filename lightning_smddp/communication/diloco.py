"""DiLoCo: the ranks of a node exchange gradients in every step, nodes their parameters every H steps.

Douillard et al., arXiv:2311.08105; in fragments, delayed and mixed: arXiv:2501.18512. Each node trains with the user's
(inner) optimizers. A round ends with a step of an outer SGD, which takes what the nodes have moved on average for a
gradient:

    nodes' own steps   shared -> local, on each node
    exchange           moved = mean of local - shared
    outer step         shared += outer_lr * (moved, with momentum);  all nodes go on from there
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from lightning_smddp.communication.algorithms import Algorithm, completed
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.compression import Compression, ErrorFeedback, Method
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.tensors import broadcast_tensors
from lightning_smddp.wording import counted


@dataclass(frozen=True)
class DiLoCo:
    """When nodes synchronise their parameters, and how: ``SMDDPStrategy(sync=DiLoCo(every=30))``.

    Args:
        every: inner steps of a round, in which each fragment is synchronised once.
        outer_lr: learning rate of the outer SGD; with 1.0, and a momentum of 0.0, nodes go on from their mean.
        momentum: of the outer SGD.
        nesterov: momentum as Nesterov's; without momentum nothing.
        fragments: parts of the model, runs of its parameters with about equally many elements; part p of P is
            synchronised in step ``(p + 1) * every // P`` of each round.
        delay: how many steps before that a fragment is sent, so that the exchange and these steps overlap.
        alpha: of the values that a node goes on from, the share that is its own; the rest is what all nodes have.
        compression: of what goes between nodes: ``"bf16"``, ``"fp16"``, ``"int8"`` or a ``Compression``; None is exact.

    Raises:
        ValueError: a value is none of the valid ones, which the message lists.
    """

    every: int
    outer_lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    compression: Method | Compression | None = None

    def __post_init__(self) -> None:
        are_whole = all(type(number) is int for number in (self.every, self.fragments, self.delay))
        if not (are_whole and 0 < self.fragments <= self.every and 0 <= self.delay < self.every // self.fragments):
            raise ValueError(
                f"{self}: every, fragments and delay have to be whole numbers, every at least 1. One fragment is under "
                "way at a time: give 1 to `every` fragments, and a delay from 0 to below every / fragments."
            )
        if not (0 < self.outer_lr < inf and 0 <= self.momentum < 1 and 0 <= self.alpha <= 1):
            raise ValueError(f"{self}: outer_lr has to be above 0, momentum 0 or more and below 1, alpha from 0 to 1.")
        if self.wire is not None and self.wire.method == "powersgd":
            raise ValueError("compression='powersgd' is for gradients. Give DiLoCo 'bf16', 'fp16' or 'int8'.")

    @property
    def wire(self) -> Compression | None:
        """``compression`` as an object."""
        return Compression.parse(self.compression)


@dataclass(frozen=True)
class _Fragment:
    """What is exchanged at once: ``parts`` are views of the 1-D ``message``, by name, shaped as the tensors."""

    number: int
    message: Tensor
    parts: dict[str, Tensor]


class OuterOptimizer:
    """What all nodes have in common of one module, and its steps. All calls are collective.

    The mean is one over ranks, so nodes count by their ranks. Floating-point buffers, such as the statistics of
    BatchNorm, are averaged with the last fragment; what was frozen since is averaged, too, without an outer step.

    Args:
        options: of the user.
        communicator: of all ranks. With one node nothing is exchanged.
        module: not wrapped; gets the values of the first rank.

    Attributes:
        momentum: by name of a parameter, in fp32 or wider; what is not there begins at 0.
    """

    def __init__(self, options: DiLoCo, communicator: Communicator, module: nn.Module) -> None:
        self.options = options
        self.communicator = communicator
        self.momentum: dict[str, Tensor] = {}
        self._module = module
        self._feedback = ErrorFeedback()
        self._algorithm: Algorithm | None = None
        if communicator.topology.num_nodes > 1:
            wire = options.wire
            feedback = self._feedback if wire is not None and wire.error_feedback else None
            self._algorithm = communicator.algorithm("hierarchical", wire, feedback)
            self._broadcast(self._values().values())
        # Of one node the mean is to be its own values to the bit; and values, unlike differences, do not bear rounding.
        self._sends_differences = communicator.compresses(options.wire)
        self._shared: dict[str, Tensor] = {}  # what all nodes had when it was synchronised
        self._fragments: list[_Fragment] = []
        self._behind: set[str] = set()  # what may be another on each node
        self._sent: list[tuple[_Fragment, Future[Any]]] = []  # one fragment, or what a round's end sends
        self._seen = self._position = 0  # the last global step, and inner steps of this round
        self._exchanges = 0
        self._waited_s = 0.0

    # ---- what is synchronised ----

    def begin(self, global_step: int) -> None:
        """Training starts from the values that are there, the same on all nodes."""
        self._seen = global_step
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Synchronise also what is trained by now."""
        values = self._values()
        buffers = dict(self._module.named_buffers())
        for name, value in values.items():
            if value.is_floating_point() and (value.requires_grad or name in buffers):
                self._shared.setdefault(name, value.clone())
        ours = {name: values[name] for name in values if name in self._shared}
        self._fragments = list(_cut(ours, self.options.fragments))
        self._feedback.forget()  # it is of fragments as they were

    def _values(self) -> dict[str, Tensor]:
        """The tensors of the module that DDP makes the same on all ranks: a buffer may be another one than before."""
        ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {
            name: torch.view_as_real(value) if value.is_complex() else value
            for name, value in named
            if name not in ignored
        }

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        broadcast_tensors(list(tensors), self.communicator.group, 0, self.communicator.device)

    # ---- steps ----

    def step(self, global_step: int) -> None:
        """Behind a batch: if optimizers have stepped in it, that was an inner step. Send, and take in, what is due."""
        if global_step == self._seen:
            return
        options = self.options
        self._seen = global_step
        self._behind = set(self._shared)
        self._position = self._position % options.every + 1
        for fragment in self._fragments:
            due = (fragment.number + 1) * options.every // options.fragments
            if self._position == due - options.delay:
                self._send([fragment])
            if self._position == due:
                self._take_in(options.alpha)

    def flush(self, global_step: int) -> None:
        """End the round: all nodes have the same parameters and buffers now, and the next step is a round's first."""
        self.step(global_step)
        self._take_in(self.options.alpha)
        self._send(fragment for fragment in self._fragments if not self._behind.isdisjoint(fragment.parts))
        self._take_in(0.0)
        self._position = 0
        self._feedback.forget()  # which is in no checkpoint
        if self._algorithm is not None:
            self._broadcast(value for value in self._values().values() if not value.is_floating_point())

    @torch.no_grad()
    def _send(self, fragments: Iterable[_Fragment]) -> None:
        values = self._values()
        for fragment in fragments:
            for name, part in fragment.parts.items():
                part.copy_(values[name])
                if self._sends_differences:
                    part.sub_(self._shared[name])
            arrival = completed(fragment.message)
            if self._algorithm is not None:
                arrival = self._algorithm.all_reduce(fragment.message, fragment.number)
                self._exchanges += 1
            self._sent.append((fragment, arrival))

    @torch.no_grad()
    def _take_in(self, alpha: float) -> None:
        """Wait for what is under way, if anything is; take the outer step, and go on from there."""
        values = self._values()
        sent = self._sent
        self._sent = []
        for fragment, arrival in sent:
            start = time.perf_counter()
            arrival.wait()
            self._waited_s += time.perf_counter() - start
            for name, mean in fragment.parts.items():
                value, shared = values[name], self._shared[name]
                if self._sends_differences:
                    mean.add_(shared)
                if value.requires_grad:
                    self._outer_step(name, mean, mean - shared)
                shared.copy_(mean)
                value.lerp_(shared, 1 - alpha)
            if alpha == 0.0:
                self._behind.difference_update(fragment.parts)

    def _outer_step(self, name: str, mean: Tensor, moved: Tensor) -> None:
        """Of the ``mean`` of all nodes, what outer SGD makes: at a rate of 1, without momentum, the same to the bit."""
        options = self.options
        rate = options.outer_lr
        if options.momentum:
            velocity = self.momentum[name] = torch.add(moved, self.momentum.get(name, 0.0), alpha=options.momentum)
            mean.add_(velocity, alpha=rate * options.momentum if options.nesterov else rate)
            if not options.nesterov:
                rate = 0.0
        mean.add_(moved, alpha=rate - 1)  # it has `moved` once already

    # ---- states, and the end ----

    def average_state(self, optimizer: Optimizer) -> None:
        """Make the state of an inner optimizer the same on all nodes: the mean; of single numbers the first rank's.

        Also after :meth:`close`, by the backend.
        """
        if self.communicator.topology.num_nodes == 1:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {
            (number, key): value
            for number, parameter in enumerate(parameters)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        # What one node alone has used has no mean.
        common = set(states).intersection(*gather(list(states), self.communicator.group))
        exact = self.communicator.algorithm("hierarchical" if self._algorithm is not None else "native")
        others = []
        for value in [states[place] for place in sorted(common)]:
            if value.is_floating_point() and value.dim():
                # Behind a fit Lightning has moved it to the host.
                mean = reduce_once(exact, _wide_copy([value.to(self.communicator.device)]))
                value.copy_(mean.view_as(value))
            else:
                others.append(value)
        exact.close()
        self._broadcast(others)

    def __str__(self) -> str:
        """What synchronising has cost."""
        times = counted(self._exchanges, "exchange")
        return f"{times} between nodes, for which rank {self.communicator.rank} waited {self._waited_s:.3g} s"

    def close(self) -> None:
        """Synchronise nothing any more; what is under way is lost. The communicator stays. Not collective."""
        if self._algorithm is not None:
            self._algorithm.close()
        self._algorithm = None
        self._fragments = []
        self._sent = []
        self._shared = {}


def _wide_copy(tensors: Iterable[Tensor]) -> Tensor:
    """One behind the other, in the type in which values are averaged and stepped: fp32, or a wider one of theirs."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def _cut(values: Mapping[str, Tensor], count: int) -> Iterator[_Fragment]:
    """At most ``count`` runs of tensors with about equally many elements, by where a tensor has its middle."""
    total = sum(value.numel() for value in values.values())
    before = 0
    runs: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, value in values.items():
        runs[(2 * before + value.numel()) * count // (2 * total)][name] = value
        before += value.numel()
    for number, run in runs.items():
        message = _wide_copy(run.values())
        sizes = [value.numel() for value in run.values()]
        parts = [part.view_as(value) for part, value in zip(message.split(sizes), run.values(), strict=True)]
        yield _Fragment(number, message, dict(zip(run, parts, strict=True)))
