"""How many rows the batches of a DataLoader have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_smddp.wire.pytree import leaves

_LOADERS = {
    "training_step": "train_dataloader",
    "validation_step": "val_dataloaders",
    "test_step": "test_dataloaders",
    "predict_step": "predict_dataloaders",
}


def loader_sizes(trainer: Any, hook: str, arguments: Sequence[Any]) -> tuple[int, ...]:
    """Sizes that a batch of a step's loader can have, the usual ones first; empty if the loader does not say.

    Args:
        trainer: whose loaders.
        hook: name of the step.
        arguments: of the step, besides the batch.
    """
    loaders = getattr(trainer, _LOADERS[hook], None)
    every = leaves(getattr(loaders, "iterables", loaders))  # a CombinedLoader has them there
    index = arguments[1] if len(arguments) > 1 else None
    if hook != "training_step" and isinstance(index, int) and index < len(every):
        every = [every[index]]
    found = [_sizes(loader) for loader in every]
    if not all(found):
        return ()
    usual, last = [sizes[0] for sizes in found], [size for sizes in found for size in sizes[1:]]
    return tuple(dict.fromkeys([*usual, *last]))


def _sizes(loader: Any) -> tuple[int, ...]:
    """The usual size, and that of the last batch if it is another."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if not isinstance(size, int):
        return ()
    if getattr(loader, "drop_last", False) or getattr(sampler, "drop_last", False):
        return (size,)
    try:
        rest = len(sampler.sampler) % size  # type: ignore[union-attr]
    except (AttributeError, TypeError):  # a stream, or a sampler without length
        return (size,)
    return (size, rest) if rest else (size,)
