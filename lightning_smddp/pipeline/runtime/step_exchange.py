"""The one meeting of a pipeline's ranks in a step: what it returns and logs, whether it failed, and on which batch.

Behind the schedule each rank says on the host whether something went wrong on it, and which batch it had; the rank
where the step ends adds what it has for all of them. Nearly always that is built as at the step before, so that only
numbers are sent, in one collective; tensors on a device follow from device to device, and no host waits for them.

::

    word of a rank:  | failed | batch | new structure | numbers and tensors of the host, up to 4 KiB |
    if needed:       all failures; the structure, by pickle; what the host has in more than 4 KiB; tensors on devices
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.communication.objects import gather
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.partition.batch_sync import CURE
from lightning_smddp.pipeline.runtime.messages import MessageLayout, layout_of
from lightning_smddp.pipeline.runtime.remote import ReplayError, TensorSpec
from lightning_smddp.wire.pytree import map_leaves

_ROOM = 4096  # bytes of results that travel with the word
_HEAD = 3 * 8  # bytes of the three numbers in front
_NUMBERS = (bool, int, float)
_CPU = torch.device("cpu")


class Failure(NamedTuple):
    """What went wrong on a stage.

    Attributes:
        microbatch: its number.
        stage: which one.
        text: what, as other ranks are told.
        error: what was raised, on the rank where it was.
        diverged: whether the step did something else than a dry run had shown; else the user's code raised.
    """

    microbatch: int
    stage: int
    text: str
    error: Exception | None
    diverged: bool


class _Slot:
    """Where a tensor or number stands in a structure. No dataclass: these are containers, and a slot is a leaf."""

    def __init__(self, kind: type, on_host: bool = True) -> None:
        self.kind = kind
        self.on_host = on_host


@dataclass(frozen=True)
class _Structure:
    """How a value is built: the value itself, with a :class:`_Slot` in place of each tensor and number."""

    skeleton: Any
    host: MessageLayout  # one message: the numbers as one tensor, then the tensors
    device: MessageLayout

    @property
    def room(self) -> int:
        """Bytes of the word that carry the host's message; 0 where that is too long."""
        return self.host.nbytes if self.host.nbytes <= _ROOM else 0


class _Parts:
    """A value taken apart."""

    def __init__(self, value: Any) -> None:
        self._numbers: list[int] = []  # 64 bits each
        self._host: list[Tensor] = []
        self.device: list[Tensor] = []
        self.skeleton = map_leaves(self._slot, value)
        self.host = [torch.tensor(self._numbers, dtype=torch.int64), *self._host]
        self.structure = (self.skeleton, _specs(self.host), _specs(self.device))
        self.pickled = b""

    def _slot(self, leaf: Any) -> Any:
        """The slot for a tensor or number; anything else is part of the structure."""
        kind = type(leaf)
        if isinstance(leaf, Tensor):
            tensor = leaf.detach()
            on_host = tensor.device.type == "cpu"
            (self._host if on_host else self.device).append(tensor)
            return _Slot(Tensor, on_host)
        if kind is float:
            (bits,) = struct.unpack("<q", struct.pack("<d", leaf))
            self._numbers.append(bits)
            return _Slot(float)
        if kind in (bool, int) and -(2**63) <= leaf < 2**63:
            self._numbers.append(int(leaf))
            return _Slot(kind)
        return leaf


class StepExchange:
    """The meeting of one kind of step, at each of its batches.

    Args:
        pipeline: its ranks, and where their collectives take tensors from.
        host: the same ranks, for what hosts read.
        last_rank: where the step ends.
    """

    def __init__(self, pipeline: Channel, host: Channel, last_rank: int) -> None:
        self._pipeline = pipeline
        self._host = host.group
        self._last_rank = last_rank
        self._structure: _Structure | None = None  # of the last results, on all ranks,
        self._pickled = b""  # and the same where they came from, by which it is known again

    def run(self, results: Any, batch: int = 0, failures: Sequence[Failure] = ()) -> Any:
        """The ``results`` of the rank where the step ends, on every rank. Collective.

        Args:
            results: there what to send: any structure of tensors, numbers and what can be pickled.
            batch: a number below 2**62 that is the same where ranks have the same batch.
            failures: on this rank.

        Raises:
            ReplayError: on every rank: the step did something else on a stage than a dry run had shown.
            ValueError: on every rank: the ranks have different batches.
            Exception: on every rank: one of the user's code, as it came, on the rank where it was raised; elsewhere a
                :class:`RankFailedError`.
        """
        if self._pipeline.group.size() == 1:
            if failures:
                _raise_cause([failures], self._host)
            return results
        parts = None
        is_new = False
        if self._pipeline.group.rank() == self._last_rank and not failures:
            parts = _Parts(results)
            try:
                parts.pickled = pickle.dumps(parts.structure)
                is_new = parts.pickled != self._pickled
            except Exception as error:  # whatever pickle raises of objects that it cannot take apart
                text = f"What the step shows cannot be sent to other ranks: {error!r}"
                failures = [Failure(0, self._last_rank, text, error, diverged=False)]
        head = torch.tensor([bool(failures), batch, is_new])
        words = self._words(head, None if is_new else parts)
        heads = [word[:_HEAD].view(torch.int64).tolist() for word in words]
        self._require_no_failure(heads, failures)
        in_word = None
        if heads[self._last_rank][2]:
            self._share_structure(parts)
        elif self._structure is not None and self._structure.room:
            in_word = words[self._last_rank][_HEAD:]
        return self._shared_parts(results, parts, in_word)

    def _words(self, head: Tensor, parts: _Parts | None) -> list[Tensor]:
        """The words of all ranks, which all are as long. Collective."""
        structure = self._structure
        room = structure.room if structure is not None else 0
        word = torch.zeros(_HEAD + room, dtype=torch.uint8)
        word[:_HEAD] = head.view(torch.uint8)
        if room and parts is not None and structure is not None:
            (word[_HEAD:],) = structure.host.send(parts.host)
        words = torch.empty(self._host.size() * len(word), dtype=torch.uint8)
        dist.all_gather_into_tensor(words, word, group=self._host)
        return list(words.view(self._host.size(), len(word)))

    def _require_no_failure(self, heads: list[list[int]], failures: Sequence[Failure]) -> None:
        """Raise on all ranks where something is wrong on one. Collective then."""
        has_failed = any(failed for failed, _, _ in heads)
        gathered: list[list[Failure]] = []
        if has_failed:
            gathered = gather([failure._replace(error=None) for failure in failures], self._host)
        if any(batch != heads[0][1] for _, batch, _ in heads):
            raise ValueError(
                f"The ranks of a pipeline have different batches, though the first ones were alike. {CURE}"
            )
        if has_failed:
            gathered[self._host.rank()] = list(failures)
            _raise_cause(gathered, self._host)

    def _share_structure(self, parts: _Parts | None) -> None:
        """Let all ranks know what the last one's results look like, where that has changed. Collective."""
        sent: list[Any] = [parts.structure if parts is not None else None]
        dist.broadcast_object_list(sent, group=self._host, group_src=self._last_rank)
        if parts is not None:
            self._pickled = parts.pickled
        skeleton, host, device = sent[0]
        self._structure = _Structure(skeleton, layout_of(host, together=True), layout_of(device))

    def _shared_parts(self, results: Any, parts: _Parts | None, in_word: Tensor | None) -> Any:
        """What the structure holds, on all ranks. Collective."""
        structure, (group, device) = self._structure, self._pipeline
        assert structure is not None
        if parts is not None:
            on_host, on_device = structure.host.send(parts.host), structure.device.send(parts.device)
        else:
            on_host, host = structure.host.receive(_CPU)
            on_device, arrived = structure.device.receive(device)
        if in_word is None:
            for message in on_host:
                dist.broadcast(message, group=self._host, group_src=self._last_rank)
        elif parts is None:
            on_host[0].copy_(in_word)
        for message in on_device:
            dist.broadcast(message, group=group, group_src=self._last_rank)
        if parts is not None:
            return results
        numbers = iter(host[0].tolist())
        tensors = {True: iter(host[1:]), False: iter(arrived)}

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, _Slot):
                return leaf
            if leaf.kind is Tensor:
                return next(tensors[leaf.on_host])
            bits = next(numbers)
            if leaf.kind is float:
                return struct.unpack("<d", struct.pack("<q", bits))[0]
            return leaf.kind(bits)

        return map_leaves(filled, structure.skeleton)


def _specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype, False) for tensor in tensors)


def _raise_cause(gathered: Sequence[Sequence[Failure]], group: dist.ProcessGroup) -> None:
    """Raise what has caused all failures of all ranks: a stage computes with what earlier ones have sent."""
    found = []
    for rank, failures in enumerate(gathered):
        found += [(failure.microbatch, failure.stage, rank, failure) for failure in failures]
    _, _, rank, first = min(found, key=lambda entry: entry[:3])
    if first.diverged:
        raise ReplayError(first.text) from first.error
    if first.error is not None:
        raise first.error
    rank = dist.get_global_rank(group, rank)
    raise RankFailedError(rank, f"Rank {rank} failed in stage {first.stage}: {first.text}")
