"""The whole of a divided module, for code that all ranks of a pipeline run alike. See the package's docstring.

Nearly always all ranks have come to the same place of a hook and need the same values, which their owners send. Code
under ``if trainer.is_global_zero:``, and loggers that do nothing on other ranks, run on the first rank alone. The
others are at the hook's end then, or have gone on to where the next collective of training begins; there they send the
parameters, gradients and buffers that it asks for, until it has come there too::

    first rank:  hook ... asks for `p` ... end | training step
    others:      hook, end |      sends `p`    | training step

There ranks also compare what the hooks have changed. Where nothing was asked for, that one small message is all.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import swap_contents, without_torch_function
from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.capture.ops import user_location
from lightning_smddp.pipeline.mesh import Channel, Ownership
from lightning_smddp.pipeline.view.global_tensor import (
    Call,
    Extent,
    GlobalStorage,
    GlobalTensor,
    GlobalViewError,
    ModuleTensors,
    key_of,
)
from lightning_smddp.pipeline.view.operations import ViewFunctions, run_operator
from lightning_smddp.wire.objects import gather
from lightning_smddp.wire.pytree import leaves, map_leaves
from lightning_smddp.wire.stream import Spec, broadcast_tensors

_END, _VALUES = 0, 1  # why a rank meets the others: it is at a hook's end, or behind it; it needs values

_CURE = (
    "What changes parameters, or computes with tensors of other ranks, has to run on all ranks alike, not under "
    "`if trainer.is_global_zero:`. The first rank alone can read parameters, gradients and buffers: "
    "`p.detach().cpu()` is a plain tensor, with which it may compute."
)


class GlobalView:
    """Lets hooks work on a divided module as if it were whole.

    Args:
        module: divided among the ranks of ``group``.
        ownership: who holds what.
        group: the pipeline.
        device: of this rank.
        host: the same ranks as ``group``, for messages without values; None is ``group`` itself.

    Attributes:
        rank: of this process in ``group``.
        changed_buffers: names of those whose values their owners alone have.
        is_used: whether the hook has done anything with the module's tensors, or others made of such.
        pending: whether code has run within the view since ranks met: the first one may still be in it.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        group: dist.ProcessGroup,
        device: torch.device,
        host: Channel | None = None,
    ) -> None:
        self.module = module
        self.ownership = ownership
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.changed_buffers: set[str] = set()
        self.pending = False
        self.is_used = False
        self.tensors = ModuleTensors(module, ownership, self)
        self.find = self.tensors.find
        self._host = host or Channel(group, device)
        self._written: dict[str, int] = {}  # since ranks compared it: tensors of the module, and what tells how
        self._last_write = "nothing"
        self._alive: weakref.WeakValueDictionary[int, GlobalTensor] = weakref.WeakValueDictionary()
        self._made = 0  # tensors
        self._copies: dict[GlobalStorage, dict[Extent, Tensor]] = {}  # fetched since the storage was last written
        self._modes: ExitStack | None = None
        self._modules = {id(child) for child in module.modules()}

    # ---- entering ----

    @property
    def is_entered(self) -> bool:
        """Whether user code runs within it now."""
        return self._modes is not None

    @contextmanager
    def entered(self, waits: bool = True) -> Iterator[None]:
        """Around a hook, on all ranks of the pipeline.

        Args:
            waits: at its end, for the first rank, which may still read; else :meth:`settle` does so later. Where
                parameters have changed, ranks wait at the end in any case.

        Raises:
            GlobalViewError: on every rank, where the ranks did different things.
        """
        if self.is_entered:
            yield
            return
        self._push()
        try:
            yield
        except BaseException:
            self._pop()
            self._forget()
            self.pending = False
            raise
        self._pop()
        self._end(waits)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Around our own code, which is about this rank's part, in hooks and outside of them. Collective if in one."""
        if not self.is_entered:
            self.settle()
            yield
            return
        # Our own code sees the gradients that the hook has made so far, and may change what copies were taken of.
        self._pop()
        try:
            self._end(waits=True)
            yield
        finally:
            self._push()

    def settle(self) -> None:
        """Before a collective of training: answer the first rank, if it is still in a hook. Collective if it may be.

        Raises:
            GlobalViewError: on every rank, where they changed different parameters, or the same ones differently.
        """
        if not self.pending:
            return
        self.pending = False
        key = 0
        what = "is at the end of a hook"
        if self._written:
            key = key_of(self._written)
            what = f"has changed {self._last_write}"
        self._meet(_END, key, what)
        self._written.clear()

    def _push(self) -> None:
        self.is_used = False
        self._modes = ExitStack()
        # torch's hooks for registrations are called for every module there is; these two look for those of ours.
        hooks = nn.modules.module
        handles = [
            hooks.register_module_parameter_registration_hook(self._refuse_new_parameter),
            hooks.register_module_buffer_registration_hook(self._value_into_buffer),
        ]
        for handle in handles:
            self._modes.callback(handle.remove)
        # Functions above autograd see the module's own parameters, and put global tensors in their place; autograd's
        # operators on these come to `run`.
        self._modes.enter_context(ViewFunctions(self))

    def _refuse_new_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Called for the registration of any parameter: the module's own may not be replaced in a hook."""
        if id(module) in self._modules and parameter is not module._parameters.get(name):
            raise GlobalViewError(
                f"Parameter {name!r} of a {type(module).__name__} is replaced by another one at {user_location()}, "
                "in a hook: a pipeline has divided the parameters that it had. Change its values "
                "(`p.data.copy_(...)`), or make the change in `__init__` or `configure_model`."
            )

    def _value_into_buffer(self, module: nn.Module, name: str, value: Any) -> Any:
        """Called for the registration of any buffer: a new value for one of the module's goes into the old tensor."""
        before = module._buffers.get(name)
        if id(module) not in self._modules or value is before or not isinstance(value, Tensor):
            return value
        with without_torch_function():  # our own looks at tensors are not the user's
            if before is None or not self.find(before):
                return self.plain(value)
            self.set_data(before, value)
        return before

    def _pop(self) -> None:
        assert self._modes is not None
        self._modes.close()
        self._modes = None

    def _end(self, waits: bool) -> None:
        self.pending = True
        changed = {None, *self._written}
        try:
            if waits or self._written:
                self.settle()
            if self.is_used:
                self.tensors.write_back(changed)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Copies are old as soon as other code runs."""
        self._copies.clear()
        if self.is_used:
            self.tensors.forget_gradients()

    # ---- where ranks meet ----

    def _meet(self, why: int, key: int, what: str) -> bool:
        """Come for ``what``, and answer the first rank as long as it alone asks for values. Collective.

        Returns:
            Whether all ranks have come for the same, as ``key`` tells; else this is the first one, which alone did.

        Raises:
            GlobalViewError: on every rank: they have come for what does not fit.
        """
        local = from_numbers([why, key], torch.int64, self._host.device)
        while True:
            rows = [torch.empty_like(local) for _ in range(self._host.group.size())]
            dist.all_gather(rows, local, group=self._host.group)
            requests = [tuple(row.tolist()) for row in rows]
            first = requests[0]
            if all(request == first for request in requests):
                return True
            if first[0] == _END:
                everyones = gather(what, self._host.group)
                lines = "; ".join(f"rank {rank} {theirs}" for rank, theirs in enumerate(everyones))
                raise GlobalViewError(
                    f"The ranks of a pipeline do different things in a hook or callback: {lines}. {_CURE}"
                )
            if requests[self.rank] == first:
                return False
            self._exchange(what)

    def _exchange(self, what: str, wanted: Sequence[GlobalTensor] = ()) -> tuple[list[Tensor], list[str]]:
        """Send what the first rank alone asks for. Collective.

        Args:
            what: this rank is here for, in words.
            wanted: on the first rank; on the others nothing.

        Returns:
            On the first rank the values; on all the names of parameters with a gradient.

        Raises:
            GlobalViewError: on every rank, if they are none of the module's, or other ranks have changed them since.
        """
        found = [self._name_of(tensor) for tensor in wanted]
        everyones = gather((found, what, self._written, self.tensors.with_gradient()), self._host.group)
        names, what, written, _ = everyones[0]
        are_known = None not in names
        for _, _, theirs, _ in everyones:
            are_known = are_known and all(theirs.get(name) == written.get(name) for name in names)
        if not are_known:
            raise GlobalViewError(
                f"Rank 0 of the pipeline alone {what}: no parameter, gradient or buffer, or one that other ranks have "
                f"changed since. {_CURE}"
            )
        sent = self._broadcast([self.tensors.named(name) for name in names])
        values = []
        for tensor, value in zip(wanted, sent, strict=False):
            shape, strides, offset, _ = tensor.extent
            values.append(value.as_strided(shape, strides, offset))
        return values, [name for _, _, _, gradients in everyones for name in gradients]

    def _name_of(self, tensor: GlobalTensor) -> str | None:
        """Of the module's parameter, gradient or buffer whose memory this is; None if there is none."""
        name = tensor.global_storage.name
        if name is None or self.tensors.named(name).dtype != tensor.dtype:
            return None
        return name

    def names_with_gradient(self) -> list[str]:
        """The parameters that have one, on whatever rank. Collective."""
        what = f"needs gradients at {user_location()}"
        if not self._meet(_VALUES, 0, what):
            return self._exchange(what)[1]
        everyones = gather(self.tensors.with_gradient(), self._host.group)
        return [name for theirs in everyones for name in theirs]

    # ---- tensors ----

    def remember(self, tensor: GlobalTensor) -> None:
        """It becomes a plain one when the view closes, if it is still there."""
        self._made += 1
        self._alive[self._made] = tensor

    def run(self, call: Call) -> Any:
        """The result of an operator call that has global tensors among its arguments."""
        self.is_used = True
        return run_operator(self, call)

    def as_global(self, structure: Any) -> Any:
        """``structure`` with global tensors in place of the module's parameters and buffers."""

        def replaced(leaf: Any) -> Any:
            found = self.find(leaf)
            return leaf if found is None else self.tensors.as_global(found)

        if any(self.find(leaf) for leaf in leaves(structure)):
            return map_leaves(replaced, structure)
        return structure

    def own_object(self, tensor: GlobalTensor) -> Tensor:
        """The module's own tensor, if ``tensor`` is what stands for it; else ``tensor``."""
        found = self.tensors.by_name.get(tensor.global_storage.name or "")
        return found.tensor if found is not None and found.global_tensor is tensor else tensor

    # ---- changes ----

    def changed(self, tensor: GlobalTensor, key: int) -> None:
        """An operation has changed ``tensor``; ``key`` tells how."""
        storage = tensor.global_storage
        storage.key = key
        self._copies.pop(storage, None)
        if storage.name is not None:
            self.note_write(storage.name, key)

    def note_write(self, name: str, key: int) -> None:
        """The parameter, buffer or gradient ``name`` has changed; ``key`` tells how."""
        self._written[name] = key
        self._last_write = f"{name!r} last, at {user_location()}"
        if name in self.ownership.buffers:
            self.changed_buffers.add(name)

    def set_data(self, target: Tensor, value: Tensor) -> None:
        """What ``target.data = value`` does: the ranks that hold a parameter or buffer take over the values.

        Raises:
            GlobalViewError: ``value`` has another shape or dtype, or ``target`` is none of the module's.
        """
        found = self.find(target)
        if found is None or value.shape != target.shape or value.dtype != target.dtype:
            described = repr(found.name) if found is not None else cast(GlobalTensor, target).describe()
            raise GlobalViewError(
                f"`.data` of {described} is set at {user_location()}: from shape {tuple(target.shape)}, {target.dtype} "
                f"to {tuple(value.shape)}, {value.dtype}. In a pipeline only that of a parameter or buffer can be set, "
                "and shape and dtype have to stay. Use `.copy_()`."
            )
        # `value` is on one rank or on all; the owner takes it, and the other holders get it from there.
        current = self.tensors.as_global(found)
        moved = self.tensors.moved(found, value)
        if self.rank in found.ranks:  # others than the owner get their values at the hook's end
            found.tensor.data = torch.empty_like(found.tensor) if moved.local is None else moved.local.detach()
        self.changed(current, key_of("data", moved.global_storage.key, current.global_storage.key))
        self.tensors.as_global(found)  # has other memory now

    # ---- values ----

    def plain(self, structure: Any) -> Any:
        """``structure`` with plain tensors, this rank's own, in place of global ones. Collective if there are any."""
        with without_torch_function():
            found = [leaf for leaf in leaves(structure) if isinstance(leaf, GlobalTensor)]
            fetched = iter(self.fetch(found))

            def value_of(leaf: Any) -> Any:
                if not isinstance(leaf, GlobalTensor):
                    return leaf
                return next(fetched).detach().requires_grad_(leaf.requires_grad)

            return map_leaves(value_of, structure) if found else structure

    def plain_log(self, log: Callable[..., None]) -> Callable[..., None]:
        """A LightningModule's ``log`` that is given plain values."""

        def logged(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            log(name, self.plain(value), *args, **kwargs)

        return logged

    def plain_result(self, result: Any, arguments: Sequence[Any]) -> Any:
        """A hook's result without global tensors; nor are any left in a checkpoint among its ``arguments``."""
        for argument in arguments:
            if isinstance(argument, dict):
                for key in list(argument):
                    argument[key] = self.plain(argument[key])
        return self.plain(result)

    def fetch(self, tensors: Sequence[GlobalTensor]) -> list[Tensor]:
        """The values of ``tensors`` on every rank, not to be written. Collective, unless all were fetched already."""
        # What is missing is decided by copies, never by `local`: so all ranks, the owner too, decide alike and meet.
        missing: dict[tuple[Any, ...], GlobalTensor] = {}
        for tensor in tensors:
            if tensor.extent not in self._copies.setdefault(tensor.global_storage, {}):
                missing[tensor.global_storage, tensor.extent] = tensor
        if missing:
            self._fetch(list(missing.values()))
        values = []
        for tensor in tensors:
            copy = self._copies[tensor.global_storage][tensor.extent]
            values.append(copy if tensor.local is None else tensor.local)
        return values

    def _fetch(self, missing: Sequence[GlobalTensor]) -> None:
        names = ", ".join(tensor.describe() for tensor in missing[:3])
        key = key_of([(tensor.global_storage.key, tensor.extent) for tensor in missing])
        what = f"needs the values of {names} at {user_location()}"
        if self._meet(_VALUES, key, what):
            values = self._broadcast(missing)
        else:
            values, _ = self._exchange(what, missing)
        for tensor, copy in zip(missing, values, strict=True):
            self._copies[tensor.global_storage][tensor.extent] = copy

    def _broadcast(self, tensors: Sequence[GlobalTensor]) -> list[Tensor]:
        """Each one's values on every rank. Collective."""
        values = []
        by_owner: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.local is None:
                value = torch.empty_like(tensor.meta, device=self.device)
            else:
                value = tensor.local.detach()
            values.append(value)
            by_owner.setdefault(tensor.owner, []).append(value)
        for owner, chosen in sorted(by_owner.items()):
            broadcast_tensors([Spec.of(value) for value in chosen], chosen, self.group, owner, self.device)
        return values

    # ---- the end ----

    def close(self) -> None:
        """Give all global tensors that still exist their values, as plain tensors. Collective."""
        self.settle()
        gc.collect()  # what is alive has to be the same on all ranks
        own = {id(found.global_tensor) for found in self.tensors.by_name.values()}
        kept: dict[tuple[Any, ...], list[GlobalTensor]] = {}
        for _, tensor in sorted(self._alive.items()):
            if id(tensor) not in own:
                kept.setdefault((tensor.owner, tensor.global_storage.key, tensor.extent), []).append(tensor)
        # What was made alike is in the same order on all ranks. Where one has fewer, as it alone ran other code, it is
        # not known which are which, and using them stays an error.
        everyones = gather({what: len(tensors) for what, tensors in kept.items()}, self._host.group)
        for what, tensors in sorted(kept.items(), key=repr):
            if all(theirs.get(what) == len(tensors) for theirs in everyones):
                for tensor in tensors:
                    (value,) = self._broadcast([tensor])
                    _make_plain(tensor, value)
        for found in self.tensors.by_name.values():
            found.global_tensor = None


def _make_plain(tensor: GlobalTensor, value: Tensor) -> None:
    """Turn the object into an ordinary tensor or parameter of this ``value``."""
    plain = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    swap_contents(tensor, value.requires_grad_(tensor.requires_grad))
    for name in ("global_view", "owner", "local", "meta", "global_storage"):
        vars(tensor).pop(name, None)
    cast(Any, tensor).__class__ = plain
