"""Random numbers within a view: all ranks draw what the pipeline's first rank would have drawn."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.view.agreement import Agreement, Ask
from lightning_smddp.pipeline.view.tensor import View


class SharedRandomState:
    """The first rank's generators on all ranks, from the first draw in a hook to its end."""

    def __init__(self, view: View, agreement: Agreement) -> None:
        self.view, self.agreement = view, agreement
        self._own: list[Tensor] | None = None  # this rank's states meanwhile

    def share(self) -> None:
        """Take over the first rank's states. Collective at the first draw."""
        if self._own is not None:
            return
        self.agreement.meet(Ask.RANDOM, "random numbers", self.view.serial)
        own = self._states()
        self._set(self.send(own))
        self._own = own

    def send(self, own: list[Tensor] | None = None) -> list[Tensor]:
        """The first rank's states. Collective."""
        states = [state.to(self.view.device) for state in own or self._states()]
        for state in states:
            dist.broadcast(state, group=self.view.group, group_src=0)
        return [state.cpu() for state in states]

    def give_back(self) -> None:
        """On the first rank random numbers go on from here; other ranks' go on from where they were."""
        own, self._own = self._own, None
        if own is not None and self.view.rank != 0:
            self._set(own)

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.view.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.view.device))
        return states

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self.view.device)
