"""What a module's forward keeps for its backward pass: all that autograd asks for, on the device, or less."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_smddp._compat.torch import storage_key

Checkpointing: TypeAlias = bool | Literal["offload"]
"""True: the inputs alone, and forward runs again in backward. ``"offload"``: all of it, in the host's memory."""
CHECKPOINTING: tuple[Checkpointing, ...] = (False, True, "offload")

_CACHES = {"past_key_values", "layer_past"}  # of transformers: a second run in the backward pass would fill them twice
CHANGES_NOTHING = "activation_checkpointing='offload' changes nothing: ranks are on CPUs, and so is all that they have"


def checkpointing_on(device: torch.device, asked: Checkpointing) -> Checkpointing:
    """What is done of ``asked`` on ``device``: what is in the host's memory is not copied there."""
    return False if asked == "offload" and device.type == "cpu" else asked


def call(how: Checkpointing, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What ``forward``, that of ``module``, returns; for its backward pass it keeps what ``how`` says."""
    if not how or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if how == "offload":
        with _saved_on_host(module):
            return forward(*args, **kwargs)
    forward = partial(forward, **{**kwargs, **dict.fromkeys(_CACHES & kwargs.keys())})
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _SameBuffers(module)))


class _SameBuffers:
    """What buffers become in here, such as BatchNorm's averages, they became before. Entered again and again."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        held = [(owner._buffers, dict(owner._buffers)) for owner in self.module.modules()]
        self.before = [
            (now, name, old, old.clone()) for now, olds in held for name, old in olds.items() if old is not None
        ]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for buffers, name, buffer, value in self.before:
                buffers[name] = buffer.copy_(value)  # another tensor may be there now


def _saved_on_host(module: nn.Module) -> saved_tensors_hooks:
    """As ``torch.autograd.graph.save_on_cpu``, but parameters stay where they are, and strides as they are."""
    # Also views of them: `F.linear` keeps the transposed weight.
    own = {storage_key(parameter) for parameter in module.parameters() if type(parameter) is nn.Parameter}

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if storage_key(tensor) in own:
            return tensor.detach()
        pinned = tensor.is_cuda and not tensor.is_sparse
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        return tensor.device, host.copy_(tensor, non_blocking=pinned)

    return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)
