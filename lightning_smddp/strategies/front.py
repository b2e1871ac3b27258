"""What the strategies of the Trainer and of Fabric have in common; what they do in their own way has a default here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from torch import Tensor

from lightning_smddp.communication.nonfinite import NonFinite
from lightning_smddp.communication.objects import broadcast
from lightning_smddp.strategies.nonfinite import NonFiniteGuard
from lightning_smddp.strategies.options import StrategyOptions
from lightning_smddp.strategies.process_group import DefaultGroup

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch.distributed's own


class Front:
    """A strategy of either: objects between ranks, and what is around backward passes and steps."""

    _meta_init = False  # parameters get no memory when they are made
    _timeout: timedelta | None  # Lightning's argument; None leaves it to torch
    _limit: timedelta  # how long a collective may wait for a rank

    def _hold_parts(self, options: StrategyOptions, close: Callable[[], None] | None = None) -> None:
        """The last thing that a constructor does; ``close`` frees what works over the process group."""
        self._communication, self._reliability = options.communication, options.reliability
        self._limit = options.communication.limit or self._timeout or _DEFAULT_TIMEOUT
        self._guard = NonFiniteGuard(options.reliability.on_nonfinite)
        self._session = DefaultGroup(options, close)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src`` on every rank, or a ``ValueError`` on every rank where it cannot be pickled."""
        return broadcast(obj, group_src=src)

    def _averaging(self, loss: Tensor) -> AbstractContextManager[None]:
        """Around Lightning's backward pass of ``loss``, in which gradients are averaged; a strategy says how."""
        return nullcontext()

    def _stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        """Around a step of ``optimizer``, its closure included."""
        return nullcontext()

    def _find_nonfinite(self, optimizer: Any) -> NonFinite | None:
        """What is wrong with the gradients that ``optimizer`` is to step; None if no rank has found anything."""
        return None
