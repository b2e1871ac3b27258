"""From the whole model to its parts and back: memory of other ranks' parameters, checkpoints, the end of training.

Parameters of other ranks are tensors on the meta device, on which torch does in-place operations without a word:
``average.add_(absent)`` leaves ``average`` as it was. So using one where nobody looks after that is an error.
"""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import swap_contents, without_torch_function
from lightning_smddp._compat.torch_steps import hooks_of, install_hooks
from lightning_smddp.pipeline.capture.ops import Kind, kind_of, name_of, sets_flag
from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.pipeline.mesh import Ownership, named_tensors
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.pytree import leaves
from lightning_smddp.wire.stream import CPU, Spec, broadcast_tensors, gather_tensors, gathered_shares

_HARMLESS = {Kind.METADATA, Kind.WATCHER, Kind.LIKE}  # functions of these kinds need no values
_allowed = threading.local()  # .depth: how many `may_be_absent` this thread is in


class AbsentParameterError(RuntimeError):
    """A parameter of another rank was used outside of hooks, where its values cannot be had."""


class AbsentParameter(nn.Parameter):
    """A parameter without values: shape, dtype and flags can be asked for, and nothing else."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each torch function that gets such a parameter, unless a mode comes first."""
        kwargs = kwargs or {}
        is_allowed = getattr(_allowed, "depth", 0) > 0
        with without_torch_function():
            if is_allowed or _is_harmless(function, args):
                return function(*args, **kwargs)
            absent = _first_absent(leaves((args, kwargs)))
            if absent is None:
                return function(*args, **kwargs)
        name, rank = vars(absent)["_held_by"]
        raise AbsentParameterError(
            f"{name_of(function)} at {user_location()} uses parameter {name!r}, whose values are on rank {rank} of "
            "the pipeline. Hooks and callbacks of Lightning may use all parameters, on all ranks alike; other code may "
            "not. Do it in a hook such as `on_train_batch_end`."
        )


def _is_harmless(function: Any, args: Any) -> bool:
    """Whether ``function`` needs no values: it asks for metadata, a flag, ``grad``, or a private attribute of torch."""
    name = name_of(function)
    is_attribute = getattr(function, "__name__", "") in ("__get__", "__set__")
    if is_attribute and name.startswith("_"):
        return True
    return name == "grad" or kind_of(function, args) in _HARMLESS or sets_flag(function)


def _first_absent(arguments: Sequence[Any]) -> AbsentParameter | None:
    for leaf in arguments:
        if isinstance(leaf, AbsentParameter) and leaf.is_meta:
            return leaf
    return None


def mark_absent(parameter: nn.Parameter, name: str, rank: int) -> None:
    """``parameter``, on the meta device, is called ``name``, and ``rank`` of the pipeline has its values.

    Parameters of other classes than torch's own are left alone.
    """
    # The object stays, so everyone who holds it (ties, lists of the user's, callbacks) gets the error.
    if type(parameter) is nn.Parameter:
        vars(parameter)["_held_by"] = (name, rank)
        parameter.__class__ = AbsentParameter


def mark_present(parameter: Tensor) -> None:
    """Make an absent parameter an ordinary one again, once memory with values is attached."""
    del vars(parameter)["_held_by"]
    parameter.__class__ = nn.Parameter


@contextmanager
def may_be_absent() -> Iterator[None]:
    """Around code of torch or ours that goes over all parameters, and may do nothing to absent ones."""
    _allowed.depth = getattr(_allowed, "depth", 0) + 1
    try:
        yield
    finally:
        _allowed.depth -= 1


def broadcast_initial(module: nn.Module, group: dist.ProcessGroup, source: int = 0, device: torch.device = CPU) -> None:
    """Every rank starts from rank ``source``'s parameters and buffers. Collective, before :func:`release`.

    Tensors on the meta device have no values and are left alone.

    Args:
        module: the complete model.
        group: all ranks, of every pipeline.
        source: rank in ``group``.
        device: where ``group``'s backend has its messages.

    Raises:
        ValueError: on every rank, if the ranks' models differ.
    """
    named = named_tensors(module)
    facts = []
    for name, tensor in named.items():
        spec = Spec.of(tensor)
        facts.append([name, *spec.to_json(), tensor.is_meta])
    # A digest of a few bytes from each rank in general; the facts of all tensors only where digests differ.
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    digests = gather_json(digest, group, device)
    if len(set(digests)) > 1:
        _raise_difference(gather_json(facts, group, device), source)
    tensors = [tensor.detach() for tensor in named.values() if not tensor.is_meta]
    specs = [Spec.of(tensor) for tensor in tensors]
    broadcast_tensors(specs, tensors, group, source, device)


def _raise_difference(gathered: Sequence[list[Any]], source: int) -> NoReturn:
    """Name the first fact in which the first rank that differs from ``source`` does."""
    expected = gathered[source]
    others = [rank for rank, facts in enumerate(gathered) if facts != expected]
    other = others[0]
    found = gathered[other]
    different = [fact for fact in found if fact not in expected]
    if not different:
        different = [fact for fact in expected if fact not in found]
    raise ValueError(
        f"The models of rank {source} and rank {other} differ, first in {different[:1]} (name, shape, dtype, on "
        "the meta device). Build the same model on every rank: nothing in it may depend on the rank."
    )


def release(module: nn.Module, ownership: Ownership, rank: int) -> None:
    """Free the memory of the parameters that ``rank`` does not hold: they become meta tensors.

    They stay the same objects under all their names and in the user's own lists, with shape, dtype and
    ``requires_grad`` and hooks; their gradients go. Buffers stay. Memory that something else
    still refers to (a view, a live autograd graph) is freed when that goes. Repeating it changes nothing.

    Raises:
        ValueError: the module has other parameters than were placed.
    """
    ownership.check(module)
    for name, parameter in module.named_parameters():
        if not ownership.is_mine(name, rank):
            set_contents(parameter, torch.empty_like(parameter, device="meta"))
            mark_absent(parameter, name, ownership.owner(name))


def set_contents(tensor: Tensor, value: Tensor) -> None:
    """Give ``tensor`` the memory of ``value``, on any device; the object and its hooks stay, its gradient goes."""
    # before:  object `tensor` -> meta, no values       after:  object `tensor` -> values
    # The Python object stays, so whoever holds it (optimizers, ties, lists of the user's) has the values too.
    hooks = hooks_of(tensor)  # they would go with the contents
    swap_contents(tensor, value.detach().requires_grad_(tensor.requires_grad))
    install_hooks(tensor, hooks)
    if isinstance(tensor, AbsentParameter) and not tensor.is_meta:
        mark_present(tensor)


def full_state_dict(
    module: nn.Module,
    ownership: Ownership,
    group: dist.ProcessGroup,
    to_all: bool,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """What ``module.state_dict()`` would be if the model were whole, with tensors on the CPU. Collective.

    Parameters come from their owners, buffers that training changes too; the rest (extra state, state of hooks) is
    this rank's. As with ``state_dict()``, tied names share memory, and values are not copies of what this rank
    holds on the CPU.

    Args:
        module: divided by :func:`release`.
        ownership: who holds what.
        group: the ranks of this pipeline.
        to_all: False leaves all ranks but the first with an empty dict.
        device: where ``group``'s backend has its messages.
    """
    rank = group.rank()
    local = _spoken_for(module, ownership, rank)
    received = gather_tensors(local, group, to_all, device)
    if not to_all and rank != 0:
        return {}
    with _lent(module, received):
        state: dict[str, Any] = module.state_dict()
    return _on_cpu(state)


def partial_state_dict(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, Any]:
    """What ``rank`` gives to :func:`full_state_dict`: nothing is copied, moved or sent.

    What no rank owns (buffers that training leaves alone, what hooks add) is in the part of every rank that has it.
    """
    # `keep_vars` gives the module's own tensor objects: they tell that a tied name is another one's, and whose it is.
    names = {id(tensor): name for name, tensor in named_tensors(module).items()}
    owned = {*ownership.parameters, *ownership.buffers}
    part = {}
    for key, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            if rank == 0:
                part[key] = value
            continue
        name = names.get(id(value))
        is_of_another = name in owned and ownership.owner(name) != rank
        if not value.is_meta and not is_of_another:
            part[key] = value.detach()
    return part


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """``module.load_state_dict(state, strict)`` on a divided module: what this rank holds is copied.

    Missing and unexpected keys and wrong shapes are found for everything, as in the whole module. Not collective.
    """
    with warnings.catch_warnings():
        # torch warns of each parameter on the meta device that copying into it does nothing. That is as it should be:
        # these are the parameters of other ranks.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*", category=UserWarning)
        with may_be_absent():
            return module.load_state_dict(state, strict=strict)


def gather_full(
    module: nn.Module,
    ownership: Ownership,
    group: dist.ProcessGroup,
    device: torch.device = CPU,
    to: torch.device | None = None,
) -> None:
    """Undo :func:`release`: every rank holds every parameter again, as the same objects. Collective.

    Args:
        module: divided by :func:`release`.
        ownership: who holds what.
        group: the ranks of this pipeline.
        device: where ``group``'s backend has its messages.
        to: where parameters of other ranks go, by one rank's share after the other; ``device`` if None.
    """
    rank = group.rank()
    named = named_tensors(module)
    destination = device if to is None else to
    local = _spoken_for(module, ownership, rank)
    for share in gathered_shares(local, group, True, device):
        for name, value in share.items():
            tensor = named[name]
            if tensor.is_meta:
                set_contents(tensor, value.to(destination))
            elif ownership.buffers.get(name, rank) != rank:
                # Every rank has the buffer, but its owner alone has what training has made of it.
                set_contents(tensor, value.to(tensor.device))


def _spoken_for(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, Tensor]:
    """The tensors that ``rank`` owns."""
    ownership.check(module)
    named = named_tensors(module)
    found: dict[str, Tensor] = {}
    for name in ownership.parameters:
        if ownership.owner(name) == rank:
            found[name] = named[name]
    for name, owner in ownership.buffers.items():
        if owner == rank and name in named:
            found[name] = named[name]
    return found


@contextmanager
def _lent(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it ``module``'s tensors of these names hold ``values``, where they are not theirs already."""
    named = named_tensors(module)
    changed = []
    try:
        for name, value in values.items():
            tensor = named[name]
            if tensor.is_meta or tensor.data_ptr() != value.data_ptr():
                # Swapped, not copied: `state_dict` then returns the received tensors themselves, and a second swap
                # gives them back.
                other = value.detach().requires_grad_(tensor.requires_grad)
                swap_contents(tensor, other)
                changed.append((tensor, other))
        yield
    finally:
        for tensor, other in changed:
            swap_contents(tensor, other)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` itself with its tensors on the CPU; those that shared memory still do."""
    # Tied names have tensors of the same memory. A copy for each of them would be saved as often.
    moved: dict[tuple[Any, ...], Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            continue
        what = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if what not in moved:
            moved[what] = value.cpu()
        state[key] = moved[what]
    return state
