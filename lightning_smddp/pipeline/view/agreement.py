"""How the ranks of a pipeline agree in a hook: who asks for what, who has gone on, and on the random numbers they draw.

A rank that needs values of another *meets* all others. Nearly always they have come to the same place and ask for the
same; then the values are sent. Code that only some ranks run (``if trainer.is_global_zero:``, loggers that do nothing
on the others) asks while the others ask for something else, or are at the hook's end already: these give what they can,
the values of parameters, buffers and gradients, and wait on. What ranks change has to be the same: see the hook's end.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.runtime.draws import first_ranks_states, generator_states, set_generator_states
from lightning_smddp.pipeline.view.tensor import SharedViewError, View
from lightning_smddp.wire.gather import gather_json


class Ask(enum.IntEnum):
    """What a rank meets the others for."""

    END = 0  # the hook is over
    VALUES = 1
    GRADIENTS = 2  # which parameters have one
    RANDOM = 3  # the state of the random number generators


class Agreed(NamedTuple):
    """What the ranks have agreed on.

    Attributes:
        ask: what is to be done together.
        ranks: those that asked for it, ascending; none if all are at the hook's end.
        serial: the highest of any rank, of the next tensor that it makes.
    """

    ask: Ask
    ranks: list[int]
    serial: int


class Agreement:
    """Meetings of a pipeline's ranks.

    Attributes:
        alike: whether all ranks gave the same detail at the last meeting.

    Args:
        view: whose tensors have the serials.
        group: the pipeline's.
        device: where its messages are.
        serve: takes part in what other ranks ask for.
    """

    def __init__(
        self,
        view: View,
        group: dist.ProcessGroup,
        device: torch.device,
        serve: Callable[[Ask, Sequence[int]], None],
    ) -> None:
        self.view = view
        self.group = group
        self.device = device
        self._serve = serve
        self.alike = True

    def meet(self, ask: Ask, detail: str) -> Agreed:
        """Say what this rank asks for, and hear the others. Collective.

        Where ranks ask for different things, the first of them gets what it asks for, and the others ask again.

        Args:
            ask: see there.
            detail: what of it; ranks that ask for the same give the same.

        Raises:
            SharedViewError: on every rank, if a rank alone asks for what others cannot give.
        """
        digest = zlib.crc32(detail.encode())
        numbers = [int(ask), digest, self.view.serial]
        local = from_numbers(numbers, torch.int64, self.device)
        # All ranks read the same rows and decide alike. In the loop this rank serves what is asked first, and says its
        # own again:
        #     rank 0: VALUES of w     rank 1: END           -> 1 serves 0, and says END again
        #     rank 0: VALUES of w     rank 1: GRADIENTS     -> 1 serves 0, and asks again
        while True:
            asks, digests, serials = self._gather(local)
            self.alike = len(set(digests)) == 1
            highest = max(serials)
            asking = [rank for rank, asked in enumerate(asks) if asked != Ask.END]
            if not asking:
                return Agreed(Ask.END, [], highest)
            first = asking[0]
            kind = Ask(asks[first])
            ranks = []
            for rank in asking:
                if asks[rank] == kind and digests[rank] == digests[first]:
                    ranks.append(rank)
            if self.view.rank in ranks or self.view.rank not in asking:
                return Agreed(kind, ranks, highest)
            self._serve(kind, ranks)

    def _gather(self, local: Tensor) -> tuple[list[int], list[int], list[int]]:
        """Of each rank what it asks for, the digest of the detail, and the serial. Collective."""
        gathered = [torch.empty_like(local) for _ in range(self.group.size())]
        dist.all_gather(gathered, local, group=self.group)
        asks, digests, serials = torch.stack(gathered, dim=1).tolist()
        return asks, digests, serials

    def tell(self, problem: str | None) -> None:
        """Raise ``SharedViewError`` on every rank if one of them has a problem. Collective."""
        for text in gather_json(problem, self.group, self.device):
            if text is not None:
                raise SharedViewError(text)


class SharedRandomState:
    """The first rank's generators on all ranks, from the first draw in a hook to its end."""

    def __init__(self, view: View, agreement: Agreement) -> None:
        self.view = view
        self.agreement = agreement
        self._own: list[Tensor] | None = None  # this rank's states meanwhile

    def share(self) -> None:
        """Take over the first rank's states. Collective at the first draw."""
        if self._own is not None:
            return
        self.agreement.meet(Ask.RANDOM, "random numbers")
        own = generator_states(self.view.device)
        states = first_ranks_states(own, self.view.group, self.view.device)
        set_generator_states(states, self.view.device)
        self._own = own

    def send(self) -> None:
        """Take part where other ranks take over the first rank's states. Collective."""
        states = generator_states(self.view.device)
        first_ranks_states(states, self.view.group, self.view.device)

    def give_back(self) -> None:
        """On the first rank random numbers go on from here; other ranks' go on from where they were."""
        own = self._own
        self._own = None
        if own is not None and self.view.rank != 0:
            set_generator_states(own, self.view.device)
