"""Where the ranks of a pipeline meet in hooks: all of them for the same values, or the first one alone.

Nearly always all ranks have come to the same place of a hook and need the same values, which their owners send. Code
under ``if trainer.is_global_zero:``, and loggers that do nothing on other ranks, run on the first rank alone. The
others are at the hook's end then, or have gone on to where the next collective of training begins; there they send the
parameters, gradients and buffers that it asks for, until it has come there too::

    first rank:  hook ... asks for `p` ... end | training step
    others:      hook, end |      sends `p`    | training step

The first rank says what it wants in one small broadcast. So where it wants nothing, that is all.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.pipeline.runtime.draws import first_ranks_states, generator_states, set_generator_states
from lightning_smddp.pipeline.view.global_tensor import GlobalTensor, GlobalViewError, key_of
from lightning_smddp.wire.broadcast import Channel
from lightning_smddp.wire.stream import Spec, broadcast_tensors

if TYPE_CHECKING:
    from lightning_smddp.pipeline.view.view import GlobalView


class Ask(enum.IntEnum):
    """What a rank comes for."""

    NOTHING = 0  # it is at a hook's end, or behind it
    WRITES = 1  # the same, and it has changed parameters: all ranks have to have changed them alike
    VALUES = 2
    GRADIENTS = 3  # which parameters have one
    RANDOM = 4  # the state of the random number generators


class Rendezvous:
    """Meetings of a pipeline's ranks.

    Attributes:
        writes: tells what was written, in order; alike on ranks that have written the same.
        last_write: in words.

    Args:
        view: whose tensors are asked for.
        channel: the pipeline's ranks, for messages between hosts.
    """

    def __init__(self, view: GlobalView, channel: Channel) -> None:
        self.view = view
        self.channel = channel
        self.writes = 0
        self.last_write = "none"
        self._compared = 0  # what `writes` was when ranks compared it
        self._own_random: list[Tensor] | None = None  # this rank's generators, while they are the first one's

    # ---- meeting ----

    def meet(self, ask: Ask, what: str = "", key: int = 0) -> bool:
        """Come for ``what``, and serve the first rank as long as it asks for something else. Collective.

        Args:
            ask: what for.
            what: in words.
            key: the same on ranks that come for the same.

        Returns:
            Whether all ranks have come for the same; else this is the first one, which alone did.

        Raises:
            GlobalViewError: this rank asks alone and is not the first one; or on all ranks: they differ in what they
                have changed.
        """
        local = from_numbers([int(ask), key], torch.int64, self.channel.device)
        while True:
            first = local.clone()
            dist.broadcast(first, group=self.channel.group, group_src=0)
            if int(first[0]) == Ask.NOTHING:
                if ask is not Ask.NOTHING:
                    raise GlobalViewError(_alone(what, self.view.rank))
                return True
            rows = [torch.empty_like(local) for _ in range(self.channel.group.size())]
            dist.all_gather(rows, local, group=self.channel.group)
            asks = [tuple(row.tolist()) for row in rows]
            if len(set(asks)) == 1:
                return True
            if asks[0][0] == Ask.WRITES:
                self._raise_difference()
            if asks[self.view.rank] == asks[0]:
                return False
            self._serve(Ask(asks[0][0]))

    def end(self) -> None:
        """Wait until the first rank needs nothing any more, and compare what was written. Collective.

        Raises:
            GlobalViewError: on every rank, where they changed different parameters, or the same ones differently.
        """
        if self.writes == self._compared:
            self.meet(Ask.NOTHING)
        else:
            self.meet(Ask.WRITES, f"to change {self.last_write}", self.writes)
        self._compared = self.writes

    @property
    def has_written(self) -> bool:
        """Whether something was written since ranks compared it."""
        return self.writes != self._compared

    def note_write(self, name: str, key: int) -> None:
        """The parameter, gradient or buffer ``name`` has changed; ``key`` tells how."""
        self.writes = key_of(self.writes, name, key)
        self.last_write = f"{name!r} at {user_location()}"

    def _raise_difference(self) -> None:
        lines = []
        for rank, write in enumerate(self.gather(self.last_write)):
            lines.append(f"on rank {rank} the last change so far is that of {write}")
        raise GlobalViewError(
            "The ranks of a pipeline changed different parameters in a hook or callback, or the same ones differently: "
            f"{'; '.join(lines)}. What changes parameters has to run on all ranks alike, not under "
            "`if trainer.is_global_zero:`."
        )

    # ---- the first rank alone ----

    def exchange(self, wanted: Sequence[GlobalTensor] | None, problem: str | None = None) -> list[Tensor]:
        """The values of ``wanted``, which the first rank alone asks for; None on the others, which serve. Collective.

        Raises:
            GlobalViewError: on every rank, if the values are none of the module's, or with this ``problem``.
        """
        keys: dict[str, int] = {}
        for tensor in wanted or ():
            storage = tensor.global_storage
            if storage.name is None or str(self.view.tensors.dtype_of(storage.name)) != tensor.extent[-1]:
                problem = problem or _alone(f"{tensor.describe()} at {user_location()}", 0)
            else:
                keys[storage.name] = storage.key
        keys, problem, place = self.broadcast((keys, problem, user_location()), 0)
        # The owners look whether they still have what is asked for, and all ranks hear of it before anything is sent.
        outdated = [name for name, key in keys.items() if self.view.key_here(name) not in (None, key)]
        if problem is None and outdated:
            problem = _alone(f"{outdated[0]!r} at {place}, which other ranks have changed since,", 0)
        for told in self.gather(problem):
            if told is not None:
                raise GlobalViewError(told)
        received = {name: self._sent(name) for name in keys}
        values = []
        for tensor in wanted or ():
            shape, strides, offset, _ = tensor.extent
            values.append(received[str(tensor.global_storage.name)].as_strided(shape, strides, offset))
        return values

    def _sent(self, name: str) -> Tensor:
        """A parameter, buffer or gradient on all ranks, laid out as on its owner. Collective."""
        source, like, owner = self.view.source_of(name)
        values = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.view.device)
        if owner == self.view.rank and source is not None:
            values.copy_(source)
        broadcast_tensors([Spec.of(values)], [values], self.view.group, owner, self.view.device)
        return values

    def _serve(self, ask: Ask) -> None:
        """Take part in what the first rank asks for alone. Collective."""
        if ask is Ask.GRADIENTS:
            self.view.gradients.announce()
        elif ask is Ask.RANDOM:
            first_ranks_states(generator_states(self.view.device), self.view.group, self.view.device)
        else:
            self.exchange(None)

    # ---- messages ----

    def broadcast(self, value: Any, source: int) -> Any:
        """The ``value`` of rank ``source`` on every rank. Collective."""
        values = [value]
        dist.broadcast_object_list(values, group=self.channel.group, group_src=source, device=self.channel.device)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order. Collective."""
        values: list[Any] = [None] * self.channel.group.size()
        dist.all_gather_object(values, value, group=self.channel.group)
        return values

    # ---- random numbers ----

    def share_random_state(self) -> None:
        """From here to the hook's end all ranks draw what the first one draws. Collective at the first draw."""
        if self._own_random is not None:
            return
        self.meet(Ask.RANDOM, "random numbers")
        own = generator_states(self.view.device)
        set_generator_states(first_ranks_states(own, self.view.group, self.view.device), self.view.device)
        self._own_random = own

    def separate_random_states(self) -> None:
        """On the first rank random numbers go on from here; other ranks' go on from where they were."""
        own = self._own_random
        self._own_random = None
        if own is not None and self.view.rank != 0:
            set_generator_states(own, self.view.device)


def _alone(what: str, rank: int) -> str:
    return (
        f"Rank {rank} of the pipeline alone needs {what}, as the others do not run this code. Run it on all ranks, and "
        "only print or write files under `if trainer.is_global_zero:`. The first rank alone can read parameters, "
        "gradients and buffers: `p.detach().cpu()` is a plain tensor, with which it may compute."
    )
