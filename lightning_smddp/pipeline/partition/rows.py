"""Which rows a batch has: what its shapes and the loader's batch size tell, and what a user says.

A sequence model may have batches with time first, ``(T, B, ...)``. Cut along their first dimension, they train
something else, without any error. So a batch is only cut where the loader shows that its rows come first; where it
does not, the caller has to try it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_smddp.pipeline.partition.microbatches import MicroBatch, outer_sizes, rows_of, split

Evidence = Literal["rows", "square", "doubt"]

SplitBatch = Callable[[Any, int], Sequence[Any]]


def evidence(batch: Any, rows: int, loader_sizes: Collection[int], told: bool = False) -> Evidence:
    """What is to be thought of the first dimension.

    Args:
        batch: any.
        rows: the number of rows that it seems to have.
        loader_sizes: how many rows batches of its loader have; empty if that is not known.
        told: the user has said how many rows it has, so that what has no rows is meant to be given whole.

    Returns:
        "rows" if it has to be the rows; "square" if it is as long as the rows, but the second one is too; "doubt" where
        nothing says that it is the rows.
    """
    if rows not in loader_sizes:
        return "doubt"
    # Where first dimensions differ, one tensor may have its rows first, and another one time.
    sizes = outer_sizes(batch)
    has_others = any(size[0] != rows for size in sizes)
    if has_others and not told:
        return "doubt"
    if (rows, rows) in sizes:
        return "square"
    return "rows"


def has_time_first(root: nn.Module) -> bool:
    """Whether some module takes sequences with time first, by the attribute that torch's modules have for it."""
    return any(getattr(module, "batch_first", None) is False for module in root.modules())


@dataclass(frozen=True)
class Splitter:
    """Cuts batches by what the user says, else by :func:`~lightning_smddp.pipeline.partition.microbatches.split`.

    Attributes:
        batch_size_fn: the number of rows of a batch.
        split_batch: from a batch and a number, a list of about so many batches, or of pairs of a batch and its number
            of rows.
    """

    batch_size_fn: Callable[[Any], int] | None = None
    split_batch: SplitBatch | None = None

    def rows(self, batch: Any) -> int | None:
        """What ``batch_size_fn`` says. Raises ``ValueError`` if that is no number of rows."""
        if self.batch_size_fn is None:
            return None
        size = self.batch_size_fn(batch)
        is_number = isinstance(size, int) and not isinstance(size, bool)
        if not is_number or size < 0:
            raise ValueError(f"batch_size_fn returned {size!r} for a batch. It has to return its number of rows.")
        return size

    def cut(self, batch: Any, count: int, rows: int | None = None) -> list[MicroBatch]:
        """Cut ``batch`` into ``count`` micro-batches, or fewer.

        Args:
            batch: any.
            count: how many.
            rows: of the batch, if that is known and ``batch_size_fn`` does not say.

        Raises:
            UnclearBatchError: where nobody says how, and it is not clear.
            ValueError: what the user's functions return is wrong.
        """
        told = self.rows(batch)
        if told is not None:
            rows = told
        if self.split_batch is not None and count > 1:
            return self._by_hook(self.split_batch, batch, count, rows)
        return split(batch, count, rows)

    def again(self, microbatch: MicroBatch, count: int) -> list[MicroBatch]:
        """Cut a micro-batch of the user's further."""
        return self.cut(microbatch.value, count, microbatch.size)

    def whole(self, batch: Any) -> MicroBatch:
        """All of a batch as one micro-batch."""
        return MicroBatch(batch, max(1, self._told_or_seen(batch)), 1.0)

    def _told_or_seen(self, batch: Any) -> int:
        """The number of rows by ``batch_size_fn``, else the one that ``batch`` seems to have."""
        rows = self.rows(batch)
        if rows is None:
            rows = rows_of(batch)
        return rows

    def _by_hook(
        self,
        hook: SplitBatch,
        batch: Any,
        count: int,
        rows: int | None,
    ) -> list[MicroBatch]:
        parts = list(hook(batch, count))
        if not parts:
            raise ValueError(f"split_batch returned no batches for num_microbatches={count}. Return one at least.")
        if all(map(_is_pair, parts)):
            values = [value for value, _ in parts]
            sizes = [size for _, size in parts]
        else:
            values = parts
            sizes = self._sizes(parts, batch, rows)
        if min(sizes) < 1:
            raise ValueError(f"split_batch returned batches of {sizes} rows. Each has to have one at least.")
        # Each knows what has cut it, as the rules of this module do not hold for it: it is cut further by the hook.
        total = sum(sizes)
        microbatches = []
        for value, size in zip(values, sizes, strict=True):
            microbatches.append(MicroBatch(value, size, size / total, cuts=self))
        return microbatches

    def _sizes(self, parts: Sequence[Any], batch: Any, rows: int | None) -> list[int]:
        """Rows of each part, if they add up to those of the batch."""
        sizes = [self._told_or_seen(part) for part in parts]
        expected = rows
        if expected is None:
            expected = rows_of(batch)
        if sum(sizes) != expected:
            raise ValueError(
                f"split_batch returned batches that seem to have {sizes} rows, of {expected} in all: their weights in "
                "the loss are not clear. Return pairs of a batch and its number of rows instead of batches."
            )
        return sizes


def _is_pair(part: Any) -> bool:
    """Whether it is a batch with its number of rows, and no batch: a pair of tensors has no int."""
    if type(part) is not tuple or len(part) != 2:
        return False
    return type(part[1]) is int
