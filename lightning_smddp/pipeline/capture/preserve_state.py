"""Runs that leave nothing behind: traces, timed runs and checks of a step before training begins."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from lightning_smddp._compat.torch import operator_facts, storage_key
from lightning_smddp._compat.torch_steps import makes_its_results, storage_again
from lightning_smddp.pipeline.capture.ops import user_location
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.pipeline.view.global_tensor import GlobalTensor
from lightning_smddp.pytree import tensors
from lightning_smddp.seeding import Generators

_CONTAINERS = frozenset({list, dict, set, OrderedDict})  # hooks of modules are in the last


@contextmanager
def preserve_state(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back random numbers, buffers, gradients, and the attributes of all modules; gradients begin anew within.

    Attributes are put back as objects; lists, dicts and sets among them also get back their members, which are the
    hooks and the registered buffers, too. What an object further inside has become is not undone. Parameters that are
    written in place are put back by :func:`~lightning_smddp.pipeline.capture.tracer.trace`.
    """
    attributes = [(vars(module), _attributes(module)) for module in root.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers() if not buffer.is_meta]
    gradients = [(parameter, parameter.grad) for parameter in root.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with Generators(root, device).preserved():
            yield
    finally:
        with torch.no_grad():
            for own, saved in attributes:
                _restore(own, saved)
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def dropped_gradients(root: nn.Module) -> Iterator[None]:
    """Within it a parameter's gradient is freed when it is complete: those of all may be too much for one process."""
    with ExitStack() as stack:
        for parameter in root.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_drop).remove)
        yield


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of what is in it; None where it is put back as an object only."""
    found = {}
    for name, value in vars(module).items():
        members = None
        if type(value) in _CONTAINERS:
            members = value.copy()
        elif _is_plain_tensor(value) and not value.requires_grad:
            members = value.clone()  # the state of a metric, say
        found[name] = (value, members)
    return found


def _is_plain_tensor(value: Any) -> bool:
    """Whether it is a tensor whose values are here."""
    return isinstance(value, Tensor) and not isinstance(value, (RemoteTensor, GlobalTensor)) and not value.is_meta


def _restore(own: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    for name in own.keys() - saved.keys():
        del own[name]
    for name, (value, members) in saved.items():
        own[name] = value
        if isinstance(members, Tensor):
            value.copy_(members)
        elif members or (members is not None and value):  # a module has a dozen dicts for hooks, nearly all empty
            refill(value, members)


def refill(container: Any, members: Any) -> None:
    """Let a list, deque, dict or set have these members alone."""
    container.clear()
    add_all = container.extend if isinstance(container, (list, deque)) else container.update
    add_all(members)


class WrittenMemory:
    """What a traced step writes in place and was there before it: parameters, and tensors of others.

    Parameters are followed by the trace, and copies stand in for tensors in the LightningModule's own attributes. What
    else a step writes in place, in objects of the user's or global variables, is written for each micro-batch, by each
    stage that comes there: it is refused by its place. What a step begins to write in mid-training is not seen.
    """

    def __init__(self, root: nn.Module) -> None:
        self._parameters = {storage_key(p) for p in root.parameters() if not p.is_meta and not is_lazy(p)}
        self._own = {storage_key(buffer) for buffer in root.buffers()}
        self._before: dict[StorageWeakRef, tuple[torch.UntypedStorage, str]] = {}

    def before(self, function: Any, args: Any, kwargs: Any) -> None:
        """An operation of torch's dispatcher comes: copy memory that it is the first to write.

        Below autograd each operator's schema says what it writes, whatever the user's code calls it.
        """
        for tensor in tensors(operator_facts(function).written(args, kwargs)):
            key = storage_key(tensor)
            if key is not None and key not in self._own and key not in self._before and _is_plain_tensor(tensor):
                self._before[key] = (tensor.untyped_storage().clone(), user_location())

    def behind(self, function: Any, result: Any) -> None:
        """It has run: memory that it has made is the step's own."""
        if makes_its_results(function):
            self._own.update(map(storage_key, tensors(result)))

    def locations(self) -> list[str]:
        """Where memory was written first (``file:line``) that is no parameter's: asked when the step is over."""
        # Whether memory was the step's own is known only then: what was its own is gone, as the keys keep nothing.
        others = [(key, place) for key, (_, place) in self._before.items() if key not in self._parameters]
        return [place for key, place in others if storage_again(key) is not None]

    def put_back(self) -> None:
        """What was written is as it was before."""
        for key, (contents, _) in self._before.items():
            storage = storage_again(key)
            if storage is not None and storage.nbytes() == contents.nbytes():
                storage.copy_(contents)
