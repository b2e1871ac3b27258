"""Private parts of torch that running a step as a whole, or for nothing, needs: each with the end of its need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from lightning_smddp.patches import patched


@contextmanager
def default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """In this context ``torch.distributed`` means ``group`` where none is named; its rank and world size too.

    In all threads: others that ask meanwhile have to ask their own group (``group.rank()``).

    The setter is public, but documented nowhere. Remove when collectives can be given a default by a context.
    """
    before = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before


@contextmanager
def mode_within_backwards(mode: TorchFunctionMode) -> Iterator[None]:
    """In this context ``mode`` sees what a backward pass runs of the user's: checkpointed functions, hooks of tensors.

    Torch hands ``backward`` and ``grad`` to function modes, and runs the pass without them. Remove when the engine
    keeps them.
    """
    original = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    with patched([(vars(torch.autograd), "_engine_run_backward", run_backward)]):
        yield


def makes_its_results(function: Any) -> bool:
    """Whether what an operation of torch's dispatcher returns has memory of its own; its schema has no public name.

    ``lift_fresh`` is given what `torch.tensor(...)` has just made.
    """
    if function is torch.ops.aten.lift_fresh.default:
        return True
    return all(result.alias_info is None for result in function._schema.returns)


def storage_again(key: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage that a ``storage_key`` refers to, if anything still has it.

    Remove when there are public weak references to storages.
    """
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(key.cdata)
    return storage


Hooks: TypeAlias = MutableMapping[int, Callable[[Tensor], Any]]


def hooks_of(tensor: Tensor) -> tuple[Hooks | None, Hooks | None]:
    """What ``register_hook`` and ``register_post_accumulate_grad_hook`` have registered.

    Remove when a tensor can be asked.
    """
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def install_hooks(tensor: Tensor, hooks: tuple[Hooks | None, Hooks | None]) -> None:
    """Have autograd call what :func:`hooks_of` has found, and nothing else; the handles of the hooks stay valid."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]
