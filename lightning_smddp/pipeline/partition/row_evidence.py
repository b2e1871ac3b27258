"""Whether the first dimension of a batch is that of its rows: what can be said from shapes and the loader's batch size.

A sequence model may have batches with time first, ``(T, B, ...)``. Cut along their first dimension, they train
something else, without any error. So a batch is only cut where the loader shows that its rows come first; where it
does not, the caller has to try it out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from torch import nn

from lightning_smddp.pipeline.partition.microbatches import outer_sizes

Evidence = Literal["rows", "square", "doubt"]


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
    sizes = outer_sizes(batch)
    if rows not in loader_sizes or (not told and any(size[0] != rows for size in sizes)):
        return "doubt"
    if (rows, rows) in sizes:
        return "square"
    return "rows"


def has_time_first(root: nn.Module) -> bool:
    """Whether some module takes sequences with time first, by the attribute that torch's modules have for it."""
    return any(getattr(module, "batch_first", None) is False for module in root.modules())
