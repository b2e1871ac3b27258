"""Private parts of torch's FSDP2 (``torch.distributed.fsdp.fully_shard``), each with its reason and its end.

Written against torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor

from lightning_smddp.patches import patched


def start(root: nn.Module) -> None:
    """Make ``root`` the module whose forward everything belongs to, before any other is called.

    FSDP2 takes the first one that is called for it, and raises when that is another. Remove when there is a public way.
    """
    _state(root)._lazy_init()


@contextmanager
def forward_of(root: nn.Module) -> Iterator[None]:
    """What is called in here is ``root``'s forward.

    ``register_fsdp_forward_method`` would also take hold of what a step returns, which need not be what is
    differentiated, and warns where that is a view. Remove when there is a public context.
    """
    # Without the arguments and the result of the step, which FSDP2 would move, cast and put hooks on: what is wanted is
    # what it does to parameters, and that units called within belong to `root`.
    state = _state(root)
    state._pre_forward(root, (), {})
    try:
        yield
    finally:
        state._post_forward(root, (), None)


def match_trained(parameters: Iterable[Any]) -> None:
    """Let whole parameters and their parts need a gradient alike: user code changes either, by what it finds.

    FSDP2 looks once, when it first gathers a parameter. Remove when it looks each time.

    Args:
        parameters: FSDP2's own objects, see :func:`parameters_of`.
    """
    for parameter in parameters:
        part = parameter.sharded_param
        whole = getattr(parameter, "_unsharded_param", part)  # the part: it was not gathered yet
        if whole.requires_grad != part.requires_grad:  # so one of them is no longer as both were
            for each in (whole, part):
                each.requires_grad_(not parameter.was_trained)
        parameter.was_trained = part.requires_grad


def parameters_of(root: nn.Module) -> dict[nn.Module, list[Any]]:
    """FSDP2's objects for the parameters that each module has as its own. Remove when there is a public way."""
    found: dict[nn.Module, list[Any]] = {}
    for parameter in _parameters(root):
        place = parameter._module_info
        # A tied parameter is one object of FSDP2's, and several modules have it, or one has it twice.
        owners = {place.module, *place.shared_modules}
        for module in owners:
            found.setdefault(module, []).append(parameter)
    return found


def watch_loss(root: nn.Module, loss: Tensor) -> None:
    """Let a backward pass of ``loss`` average the gradients of ``root``'s own parameters too.

    FSDP2 does that for what ``root``'s forward returns, which manual optimization does not wait for, nor a step that
    returns its loss in an object of its own. Remove when there is a public way.
    """
    if loss.requires_grad:
        loss.register_hook(_state(root)._pre_backward)


def whole_parameters(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stand for parameters in forward and backward passes, with their names, once they were gathered.

    Those that hooks on ``root.parameters()`` are registered on get no gradient. Remove when there is a public way.
    """
    for parameter in _parameters(root):
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None:
            yield parameter._param_fqn, whole


def parts(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's parts of parameters, with their names, also while whole ones stand for them in ``root``.

    Remove when there is a public way.
    """
    return ((parameter._param_fqn, parameter.sharded_param) for parameter in _parameters(root))


def hold_memory(root: nn.Module, on: bool) -> None:
    """Whether the memory of whole parameters stays allocated while they are divided, as all of ``root`` is now.

    FSDP2 frees it each time, which is nothing on a GPU, where torch keeps it. Remove when it can be told not to.
    """
    # An attribute of the object hides the method of its class; without it, what was kept is freed at once.
    for parameter in _parameters(root):
        if on:
            parameter.free_unsharded_param = _keep
            continue
        was_held = vars(parameter).pop("free_unsharded_param", None) is not None
        if was_held and hasattr(parameter, "_unsharded_param"):
            parameter.free_unsharded_param()


def _keep(*_: Any) -> None:
    """In place of what frees or moves."""


def _parameters(root: nn.Module) -> Iterator[Any]:
    """FSDP2's objects for all parameters: those of each group of each unit, in the order of modules."""
    for state in _state(root)._state_ctx.all_states:
        for group in _groups(state):
            yield from group.fsdp_params


def undo(root: nn.Module) -> None:
    """Let ``root`` and the modules in it be what they were before ``fully_shard``, except for their parameters.

    Remove when torch has a way back.
    """
    for module in root.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(mark, None)
        if isinstance(module, FSDPModule):
            _undo_one(module)


def _undo_one(module: Any) -> None:
    state = _state(module)
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in _groups(state):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    for handle in handles:
        handle.remove()
    # `fully_shard` had made a class FSDPLinear with the bases FSDPModule and Linear, and put it in the place of Linear.
    made_class = type(module)
    module.__class__ = made_class.__mro__[2]
    # What a module remembers of being composed: with it, a second `fully_shard` would raise.
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(module).pop(key, None)
    _module_state_mapping.pop(module, None)


def _state(module: nn.Module) -> Any:
    mark: Any = fully_shard
    return mark.state(module)


def _groups(state: Any) -> list[Any]:
    """A module's parameters, as FSDP2 communicates them."""
    return list(state._fsdp_param_groups)


def divided_like(local: Tensor, like: DTensor) -> DTensor:
    """This rank's part ``local`` of a tensor that is divided as ``like`` is. Not collective.

    The public ``from_local`` moves a part that is on the CPU to the mesh's GPUs, where offloaded ones are not. Remove
    when it leaves them there.
    """
    return _from_local_no_grad(local, like._spec)


def move_undivided(root: nn.Module, device: torch.device) -> None:
    """``root.to(device)``, without its divided parameters. Remove when modules can move a part of themselves."""
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
    # `to` moves by `_apply`, which does nothing meanwhile: what is left of `to` is to note the device, in a
    # LightningModule.
    with patched([(vars(root), "_apply", _keep)]):
        root.to(device)


@contextmanager
def dtensor_functions(handle: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Within it ``handle(function, args, kwargs)`` is what operators on ``DTensor`` objects do, of all threads.

    A mode would slow down operators on plain tensors too. Remove when DTensors can be told to compute so.
    """

    # One class for the process: who enters a second context gets the first one's function back at its end.
    def ours(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return handle(function, args, kwargs or {})

    before = vars(DTensor)["__torch_function__"]
    DTensor.__torch_function__ = classmethod(ours)  # type: ignore[assignment]
    try:
        yield
    finally:
        DTensor.__torch_function__ = before  # type: ignore[method-assign]


def call_as_is(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator does when nobody handles it. Remove with :func:`dtensor_functions`."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)
