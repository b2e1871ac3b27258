"""Runs that leave nothing behind: trial runs of a step before training begins."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_smddp._compat.torch import DispatchMode, operator_facts, storage_key
from lightning_smddp._compat.torch_steps import makes_its_results, registered_buffers
from lightning_smddp.pipeline.capture.foreign_writes import ForeignWrites
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.pipeline.view.global_tensor import GlobalTensor
from lightning_smddp.seeding import Generators
from lightning_smddp.wire.pytree import tensors

# Attributes of every module that are not put back as such: parameters and buffers are, each by itself.
_STRUCTURE = {"_parameters", "_buffers", "_modules"}
_CONTAINERS = frozenset({list, dict, set, OrderedDict})  # hooks of modules are in the last
_PLAIN = frozenset({bool, int, float, str, type(None)})  # most attributes of modules: nothing in them to be put back


@contextmanager
def preserve_state(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back random numbers, parameters, buffers, gradients, and the attributes of all modules.

    Parameters that are written in place are put back inside of :func:`kept_parameters` alone.

    Attributes are put back as objects; lists, dicts and sets among them also get back their members. What an object
    further inside has become is not undone.
    """
    modules = list(root.modules())
    parameters = list(root.parameters())
    attributes = [(module, _attributes(module)) for module in modules]
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers() if buffer.device.type != "meta"]
    registered = []
    for module in modules:
        if not isinstance(module, torch.jit.ScriptModule):  # whose buffers cannot be replaced
            own = registered_buffers(module)
            registered.append((own, dict(own)))
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    contents = []
    for parameter in parameters:
        if not is_lazy(parameter) and not parameter.is_meta:
            contents.append((parameter, parameter.data))
    # Within, gradients begin anew, as in a first step; those that were there come back as the same tensors.
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with Generators(root, device).preserved():
            yield
    finally:
        for module, saved in attributes:
            _restore(module, saved)
        for own, before in registered:
            _restore_buffers(own, before)
        for parameter, data in contents:
            # The same memory again, not a copy of its values: optimizers and views may hold it.
            if parameter.device == data.device and parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def kept_parameters(root: nn.Module) -> Iterator[ForeignWrites]:
    """Put back the values of parameters that are written within it, of which copies are made when that happens.

    Of other tensors, too, that were there before: those it gives.
    """
    keeper = _Keeper(root)
    try:
        with keeper:
            yield keeper.foreign
    finally:
        keeper.foreign.put_back()
        with torch.no_grad():
            for alias, value in keeper.saved.values():
                alias.copy_(value)


class _Keeper(DispatchMode):
    """Copies what a parameter, or a tensor that was there before, has in it when an operator is about to write it.

    Attributes:
        aliases: of each storage the parameters in it.
        saved: by identity of an alias: it, and a copy of what it was.
        own: storages of buffers, and of what is made within.
        foreign: notes all others that are written.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.aliases: dict[Any, list[Tensor]] = {}
        for parameter in root.parameters():
            if not parameter.is_meta and not is_lazy(parameter):
                key = storage_key(parameter)
                self.aliases.setdefault(key, []).append(parameter.detach())
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.foreign = ForeignWrites()
        self.own = {storage_key(buffer) for buffer in root.buffers()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Below autograd each operator's schema says what it writes, whatever the user's code calls it: a copy is made
        # just before the first write, so a run that writes no parameter copies none.
        for tensor in tensors(operator_facts(function).written(args, kwargs)):
            self._save(tensor)
        result = function(*args, **kwargs)
        if makes_its_results(function):
            self.own.update(map(storage_key, tensors(result)))
        return result

    def _save(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        for alias in self.aliases.get(key, ()):
            if id(alias) not in self.saved:
                self.saved[id(alias)] = (alias, alias.clone())
        # Neither a buffer, which is put back by itself, nor made within, nor a parameter.
        if key not in self.own and key not in self.aliases:
            self.foreign.note(tensor)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of its members if it has some."""
    attributes = {}
    for name, value in vars(module).items():
        if name not in _STRUCTURE:
            attributes[name] = (value, _members(value))
    return attributes


def _members(value: Any) -> Any:
    """What is put back into ``value``, as it may be changed in place; None if it is only put back as an object."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind in _CONTAINERS:
        return value.copy()
    if issubclass(kind, torch.Generator):  # torch's isinstance for them is Python code, and this runs at each trial
        return value.get_state()
    if not isinstance(value, Tensor) or isinstance(value, (RemoteTensor, GlobalTensor)):
        return None
    if value.requires_grad or value.device.type == "meta":
        return None
    return value.clone()  # the state of a metric, say


def _restore_buffers(own: dict[str, Any], before: dict[str, Any]) -> None:
    """Register the same buffers again, in the same order, if the step has replaced, added or removed one."""
    is_replaced = any(own.get(name) is not buffer for name, buffer in before.items())
    if is_replaced or len(own) != len(before):
        own.clear()
        own.update(before)


def _restore(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> None:
    own = vars(module)
    added = [name for name in own if name not in saved and name not in _STRUCTURE]
    for name in added:
        del own[name]
    for name, (value, members) in saved.items():
        own[name] = value
        if members is None:
            continue
        kind = type(value)
        if kind in _CONTAINERS:
            _restore_members(value, members)
        elif issubclass(kind, torch.Generator):
            value.set_state(members)
        else:
            with torch.no_grad():
                value.copy_(members)


def _restore_members(container: Any, members: Any) -> None:
    if not container and not members:  # nearly all of them: a module has a dozen dicts for hooks
        return
    container.clear()
    if isinstance(container, list):
        container.extend(members)
    else:
        container.update(members)
