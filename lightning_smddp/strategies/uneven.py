"""``CommunicationOptions(uneven=...)``: ranks whose data ends earlier than that of others.

``"stop"``: an epoch ends for all ranks where the data of the first one does. ``"join"``: it goes on to the end of the
last one's, and a rank without data repeats its last batch, which counts nothing: all ranks take part in all collectives
then, and gradients and what is logged are means over the ranks that have data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_smddp._compat.torch import initial_metric_state, set_metric_state
from lightning_smddp._compat.trainer import training_loaders, training_results
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.tensors import broadcast_tensors
from lightning_smddp.pytree import copied
from lightning_smddp.resume.resumable_loader import RandomStates, ResumableLoader
from lightning_smddp.strategies.tables import say
from lightning_smddp.wording import counted


class EvenLoader(ResumableLoader):
    """Stands for a training ``loader`` that has as many batches on every rank. Made and iterated by all ranks at once.

    Args:
        loader: a ``DataLoader``, or any iterable.
        states: the run's random numbers.
        trainer: of the run.
        joins: whether the longest loader ends an epoch; else the shortest one does.

    Attributes:
        ends: how many batches each rank has in this epoch; inf where that is not known yet.

    Raises:
        ValueError: on every rank: one has no batch at all, and others have some.
    """

    ends: list[float]
    _end: float

    def __init__(self, loader: Any, states: RandomStates, trainer: Any, joins: bool) -> None:
        super().__init__(loader, states)
        vars(self).update(_trainer=trainer, _joins=joins, _said=None)
        self._compare_lengths()

    @override
    def __len__(self) -> int:
        return self._end  # type: ignore[return-value]  # of inf `len` raises TypeError: nobody knows it

    @override
    def _make(self) -> Iterator[Any]:
        iterator = super()._make()
        self._compare_lengths()
        return self._together(iterator)

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        rank, latest = dist.get_rank(), None
        for number in itertools.count():
            fetched = list(itertools.islice(batches, 1)) if number < self.ends[rank] else []
            if math.inf in self.ends:
                have = self._everyones(len(fetched))
                self._take([end if has else min(end, number) for end, has in zip(self.ends, have, strict=True)])
            if number >= self._end or (number < self.ends[rank] and not fetched):  # fewer than its length says
                return
            if self._joins and fetched:
                latest = fetched[0]
            yield fetched.pop() if fetched else latest  # a variable would keep the batch

    def _compare_lengths(self) -> None:
        try:
            own = len(self.loader)
        except (TypeError, NotImplementedError):
            own = -1
        lengths = self._everyones(own)
        self._take([math.inf] * len(lengths) if -1 in lengths else lengths)

    def _everyones(self, number: int) -> list[int]:
        """Each rank's ``number``, by a message between hosts where they are connected."""
        on_hosts = "cpu:" in dist.get_backend_config(world())
        device = "cpu" if on_hosts else self._trainer.strategy.root_device
        numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
        numbers[dist.get_rank()] = number
        dist.all_reduce(numbers)
        return numbers.tolist()

    def _take(self, ends: Sequence[float]) -> None:
        """The data of each rank ends there, as far as is known."""
        first, last = min(ends), max(ends)
        vars(self).update(ends=ends, _end=last if self._joins else first)
        if first == last:
            return
        text = f"epoch {self._trainer.current_epoch}: rank {ends.index(first)} has {counted(int(first), 'batch')}"
        if first == 0:
            raise ValueError(f"{text}, others more. Give each at least one, or use fewer ranks.")
        if not self._joins and self._said != first and self._trainer.is_global_zero:
            vars(self)["_said"] = first
            say(f"{text}, and it ends there for all", self._trainer)


class Join:
    """``uneven="join"`` in a fit: a rank that repeats its last batch in a training step leaves no trace there.

    Args:
        trainer: of the fit, whose loader is made.

    Raises:
        ValueError: on every rank: there are several loaders, or layers that count a repeated batch.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module: nn.Module = trainer.lightning_module
        self._loaders = training_loaders(trainer).flattened
        self._in_step = False
        if len(self._loaders) > 1 or any(isinstance(module, nn.SyncBatchNorm) for module in self._module.modules()):
            raise ValueError(
                "uneven='join' cannot be used with several training loaders, nor with SyncBatchNorm, whose statistics "
                "are of all ranks' batches. Use uneven='stop'."
            )

    @property
    def with_data(self) -> list[bool]:
        """Of each rank, whether the present batch is its own, and not its last one once more."""
        number = self._trainer.fit_loop.epoch_loop.batch_idx
        return [end > number for end in self._loaders[0].ends]

    @property
    def counts(self) -> bool:
        """Whether this rank's present batch is its own."""
        return self.with_data[dist.get_rank()]

    def _metrics(self) -> list[Metric]:
        found = [*self._module.modules(), *training_results(self._trainer)]
        return [each for each in found if isinstance(each, Metric)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step: without data metrics and logged values stay, and buffers are those of others."""
        with_data, counts = self.with_data, self.counts
        states = {}
        if not counts:
            states = {id(each): (each.update_count, copied(each.metric_state)) for each in self._metrics()}
        self._in_step = True
        yield
        self._in_step = False
        if all(with_data):
            return
        for metric in [] if counts else self._metrics():
            # What is logged for the first time keeps this step's value, but nothing of it for the epoch's.
            set_metric_state(metric, *states.get(id(metric), (1, initial_metric_state(metric))))
        # The first rank's buffers go to all others before the next step. By `data`, as the backward pass is to come.
        buffers = [buffer.data for buffer in self._module.buffers()]
        received = buffers if not counts else copied(buffers)
        broadcast_tensors(received, world(), with_data.index(True), self._trainer.strategy.root_device)

    def share(self, value: Any, group: dist.ProcessGroup | None, reduce_op: Any) -> Any:
        """What this rank brings to a reduction over ``group``, so that in a step ranks without data do not count."""
        if not isinstance(value, Tensor):
            return value
        is_mean = reduce_op in ("mean", "avg")
        if is_mean and not value.is_floating_point():
            value = value.float()  # Lightning rounds the mean of integers, such as of numbers of samples, down
        if not self._in_step:
            return value
        if not self.counts:
            return torch.full_like(value, {"min": math.inf, "max": -math.inf}.get(reduce_op, 0.0))
        present = [self.with_data[rank] for rank in dist.get_process_group_ranks(group or world())]
        return value * (len(present) / sum(present)) if is_mean else value
