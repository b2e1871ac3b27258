"""Parameters on the meta device: those of other ranks, and those that have no first values yet.

They keep name, shape and flags. Torch does in-place operations on them without a word: ``average.add_(absent)`` leaves
``average`` as it was. So using one of another rank where nobody looks after that is an error.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_smddp._compat.torch import initializer, swap_contents, without_subclass_functions, without_torch_function
from lightning_smddp._compat.torch_steps import hooks_of, install_hooks
from lightning_smddp.pipeline.capture.ops import Kind, kind_of, name_of, sets_flag, user_location
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.runtime.remote_tensor import ACTIVE
from lightning_smddp.pytree import leaves

_HARMLESS = {Kind.METADATA, Kind.WATCHER, Kind.LIKE}  # functions of these kinds need no values
_GRAD: Any = Tensor.grad  # torch's attribute
Initializers: TypeAlias = list[tuple[str, Callable[[], object]]]


# ---- parameters of other ranks ----


class AbsentParameterError(RuntimeError):
    """A parameter of another rank was used outside of hooks, where its values cannot be had."""


class AbsentParameter(nn.Parameter):
    """A parameter without values: shape, dtype and flags can be asked for, and nothing else."""

    def _get_grad(self) -> Any:
        with without_subclass_functions():
            return _GRAD.__get__(self)

    def _set_grad(self, value: Tensor | None) -> None:
        with without_subclass_functions():
            _GRAD.__set__(self, value)

    # Optimizers ask all parameters for it in each step: `__torch_function__` takes five times as long.
    grad: Any = property(_get_grad, _set_grad)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each torch function that gets such a parameter, unless a mode comes first."""
        kwargs = kwargs or {}
        run = ACTIVE.run
        if run is not None and not run.inside:
            return run.parameter_operation(function, args, kwargs)
        with without_torch_function():
            used = [] if _is_harmless(function, args) else leaves((args, kwargs))
            absent = [leaf for leaf in used if isinstance(leaf, AbsentParameter) and leaf.is_meta]
            if not absent:
                return function(*args, **kwargs)
        name, rank = vars(absent[0])["_held_by"]
        raise AbsentParameterError(
            f"{name_of(function)} at {user_location()} uses parameter {name!r}, whose values are on rank {rank} of "
            "the pipeline. Hooks and callbacks of Lightning may use all parameters, on all ranks alike; other code may "
            "not. Do it in a hook such as `on_train_batch_end`."
        )


def _is_harmless(function: Any, args: Any) -> bool:
    """Whether ``function`` needs no values: it asks for metadata, a flag, ``grad``, or a private attribute of torch."""
    name = name_of(function)
    is_attribute = getattr(function, "__name__", "") in ("__get__", "__set__")
    if name == "grad" or (is_attribute and name.startswith("_")):
        return True
    return kind_of(function, args) in _HARMLESS or sets_flag(function)


def release(module: nn.Module, ownership: Ownership, rank: int) -> None:
    """Free the memory of the parameters that ``rank`` does not hold: they become meta tensors.

    They stay the same objects under all their names and in the user's own lists, with shape, dtype, ``requires_grad``
    and hooks; their gradients go. Buffers stay. Memory that something else still refers to (a view, a live autograd
    graph) is freed when that goes. Repeating it changes nothing.
    """
    for name, parameter in module.named_parameters():
        if ownership.is_mine(name, rank):
            continue
        # The strides are the holders' own: what hooks do with views goes by them, on all ranks.
        absent = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        set_contents(parameter, absent)
        # Parameters of other classes than torch's own are left alone.
        if type(parameter) is nn.Parameter:
            vars(parameter)["_held_by"] = (name, ownership.owner(name))
            parameter.__class__ = AbsentParameter


def set_contents(tensor: Tensor, value: Tensor) -> None:
    """Give ``tensor`` the memory of ``value``, on any device; the object and its hooks stay, its gradient goes."""
    # before:  object `tensor` -> meta, no values       after:  object `tensor` -> values
    # The Python object stays, so whoever holds it (optimizers, ties, lists of the user's) has the values too.
    hooks = hooks_of(tensor)  # they would go with the contents
    swap_contents(tensor, value.detach().requires_grad_(tensor.requires_grad))
    install_hooks(tensor, hooks)
    if isinstance(tensor, AbsentParameter) and not tensor.is_meta:
        del vars(tensor)["_held_by"]
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]


# ---- deferred initialisation: the same values for any number of ranks and stages ----


@contextmanager
def parameters_on_meta(on: bool = True) -> Iterator[None]:
    """Within it, if ``on``, new parameters of any module go to the meta device, and buffers stay: for big models.

    Each parameter is created first and then loses its memory, so the peak is one parameter. What is assigned to a
    name that the module has already is taken for values that the user wants, such as those of a pretrained model, and
    stays. First values set in place by the module's constructor are lost: :func:`initialize_deferred` sets them.
    """

    def forget_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # Called before the module takes the parameter: where the name is known, it replaces another one.
        if parameter is not None and not parameter.is_meta and module._parameters.get(name) is None:
            set_contents(parameter, torch.empty_like(parameter, device="meta"))

    with ExitStack() as stack:
        if on:
            stack.callback(register_module_parameter_registration_hook(forget_values).remove)
        yield


def initialize_deferred(module: nn.Module, names: Collection[str], device: torch.device, seed: int) -> None:
    """Give memory and first values to the parameters ``names`` and to all buffers, where they are on the meta device.

    Module by module: its own parameters and buffers (not those of modules in it) get memory; then its
    ``reset_parameters()`` runs, which has to fill them in place. In models that have ``_init_weights(module)``, as
    those of transformers do, that follows, for the module and for the modules around it. Random numbers depend on
    ``seed`` and these modules' names alone, so the values do not depend on what is initialised where. A tied parameter
    gets its values from the first module that has it. What a constructor does beyond that is not repeated.

    Args:
        module: the model.
        names: parameters that this rank holds, by first name.
        device: where to.
        seed: the same on every rank.

    Raises:
        ValueError: a module has no initialiser, or it leaves something without values, or assigns a new tensor.
    """
    named = [parameter for name, parameter in module.named_parameters() if name in names]
    wanted = {tensor for tensor in [*named, *module.buffers()] if tensor.is_meta}
    values: dict[Tensor, Tensor] = {}
    meta = torch.device("meta")
    hidden = [(parameter, _contents(parameter, meta)) for parameter in module.parameters() if not parameter.is_meta]
    with swapped(hidden):  # an initialiser sees no values but those that it sets
        for name, child in module.named_modules():
            keys = [key for key, tensor in _own_tensors(child).items() if tensor in wanted]
            if keys:
                values |= _first_values(module, name, keys, device, seed)
                wanted -= values.keys()
    for parameter, value in values.items():
        set_contents(parameter, value)


@contextmanager
def swapped(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within it both tensors of a pair have each other's contents."""
    with ExitStack() as stack:
        for tensor, other in pairs:
            swap_contents(tensor, other)
            stack.callback(swap_contents, tensor, other)
        yield


def _first_values(root: nn.Module, name: str, keys: list[str], device: torch.device, seed: int) -> dict[Tensor, Tensor]:
    """First values for the module ``name``'s own parameters and buffers ``keys``, by tensor.

    All of its parameters get some, whether this rank holds them or not, as they draw from the same random numbers in
    turn: so a parameter's first values are the same in every layout.
    """
    module = root.get_submodule(name)
    title = f"{type(module).__name__} {name!r}" if name else type(module).__name__
    initializers = _initializers(root, name)
    if not initializers:
        raise ValueError(
            f"{title} has {', '.join(keys)} on the meta device and nothing that sets their first values. Define "
            f"`reset_parameters(self)` in {type(module).__name__}, or create it on a real device."
        )
    # They have memory only while their initialisers run; before and after `contents` has it. So those of the next
    # module see none of these values.
    own = _own_tensors(module)
    contents = {key: _contents(tensor, device) for key, tensor in own.items() if tensor.is_meta}
    devices = [device] if device.type == "cuda" else []
    with (
        swapped([(own[key], blank) for key, blank in contents.items()]),
        torch.random.fork_rng(devices=devices),
        torch.no_grad(),
    ):
        # A seed of its own for each module and each of its initialisers: what is drawn depends neither on which
        # other modules a rank holds, nor on the order in which they are come to.
        for caller, initialize_one in initializers:
            digest = hashlib.sha256(repr((seed, name, caller)).encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))  # torch's seeds have 64 bits
            initialize_one()
    present = _own_tensors(module)
    replaced = [key for key in contents if present.get(key) is not own[key]]  # training would not reach the new one
    empty = [key for key in keys if bool(contents[key].isnan().any())]  # still the NaN that it was
    if replaced or empty:
        names = ", ".join(dict.fromkeys(replaced + empty))
        raise ValueError(
            f"The initialisation of {title} leaves {names} without values. Fill them in place in its "
            "`reset_parameters(self)`, or create it on a real device."
        )
    return {own[key]: contents[key] for key in keys}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers, not those of modules in it."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _initializers(root: nn.Module, name: str) -> Initializers:
    """What sets the module's own first values, in order, each with the name of the module that it is called for."""
    # First its own, then `_init_weights` for each module from it outwards, as a whole model is initialised from the
    # inside out.
    found: Initializers = []
    own = initializer(root.get_submodule(name))
    if own is not None:
        found.append((f"{name}()", own))
    paths = sorted({"", *accumulate(name.split("."), "{}.{}".format)}, reverse=True)  # of "a.b" itself, "a" and ""
    for index, path in enumerate(paths):
        for around in paths[index:]:
            method: Any = getattr(root.get_submodule(around), "_init_weights", None)
            if callable(method) and _takes_a_module(method):
                found.append((path, partial(method, root.get_submodule(path))))
                break
    return found


def _takes_a_module(method: Callable[..., object]) -> bool:
    try:
        inspect.signature(method).bind(nn.Module)
    except TypeError:  # someone else's meaning of the name
        return False
    return True


def _contents(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for ``tensor``, filled with NaN, which no initialiser leaves behind; integers are 0, as they have none."""
    blank = torch.zeros_like(tensor, device=device, requires_grad=tensor.requires_grad)
    if blank.is_floating_point() or blank.is_complex():
        blank.detach().fill_(torch.nan)
    return blank
