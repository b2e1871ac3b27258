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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_smddp._compat.torch import swap_contents, without_torch_function
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.tensors import broadcast_tensors, from_numbers
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
from lightning_smddp.pytree import leaves, map_leaves

# Why a rank meets the others: it is at a hook's end, or behind it; it needs values, or names of gradients.
_END, _VALUES, _GRADIENTS = range(3)

_CURE = (
    "What changes parameters, or computes with tensors of other ranks, has to run on all ranks alike, not under "
    "`if trainer.is_global_zero:`. The first rank alone can read parameters, gradients and buffers: "
    "`p.detach().cpu()` is a plain tensor, with which it may compute."
)

Contents: TypeAlias = tuple[GlobalStorage, int, Extent]
"""What a global tensor holds: its memory, the key of what has made the values, and what it covers."""


class Served(NamedTuple):
    """What ranks send that only the first one, or all of them, have asked for.

    Attributes:
        values: of whole parameters, gradients and buffers.
        with_gradient: names of the parameters that have one.
    """

    values: list[Tensor]
    with_gradient: list[str]


class GlobalView:
    """Lets hooks work on a divided module as if it were whole.

    Args:
        module: divided among the ranks of ``group``.
        ownership: who holds what.
        group: the pipeline.
        device: of this rank.
        host: the same ranks as ``group``, for messages without values.

    Attributes:
        rank: of this process in ``group``.
        changed_buffers: names of those whose values their owners alone have.
        has_trained: whether a training step has run since all buffers were shared. It may have changed any.
        pending: whether code has run within the view since ranks met: the first one may still be in it.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        group: dist.ProcessGroup,
        device: torch.device,
        host: Channel,
    ) -> None:
        self.module = module
        self.ownership = ownership
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.changed_buffers: set[str] = set()
        self.has_trained = False
        self.pending = False
        self._alive: weakref.WeakValueDictionary[int, GlobalTensor] = weakref.WeakValueDictionary()
        self._numbers = count()
        self.tensors = ModuleTensors(self)
        self._alive.clear()  # the module's own are nobody's to keep
        self.find = self.tensors.find
        self._host = host
        self._written: dict[str, int] = {}  # since ranks compared it: tensors of the module, and what tells how
        self._last_write = ""
        self._copies: dict[Contents, Tensor] = {}  # fetched in this hook
        self._modes: ExitStack | None = None

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
        what = f"has changed {self._last_write}" if self._written else "is at the end of a hook"
        self._meet(_END, key_of(self._written), what)
        self._written.clear()

    def _push(self) -> None:
        self._modes = ExitStack()
        # torch's hooks for registrations are called for every module there is; these two look for tensors of ours.
        self._modes.callback(register_module_parameter_registration_hook(self._refuse_new_parameter).remove)
        self._modes.callback(register_module_buffer_registration_hook(self._value_into_buffer).remove)
        # Functions above autograd see the module's own parameters, and put global tensors in their place; autograd's
        # operators on these come to `run`.
        self._modes.enter_context(ViewFunctions(self))

    def _refuse_new_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Called for the registration of any parameter: the module's own may not be replaced in a hook."""
        before = module._parameters.get(name)
        if parameter is not before and self.find(before) is not None:
            raise GlobalViewError(
                f"Parameter {name!r} of a {type(module).__name__} is replaced by another one at {user_location()}, "
                "in a hook: a pipeline has divided the parameters that it had. Change its values "
                "(`p.data.copy_(...)`), or make the change in `__init__` or `configure_model`."
            )

    def _value_into_buffer(self, module: nn.Module, name: str, value: Any) -> Any:
        """Called for the registration of any buffer: a new value for one of the module's goes into the old tensor."""
        before = module._buffers.get(name)
        if value is before or not isinstance(value, Tensor):
            return value
        with without_torch_function():  # our own looks at tensors are not the user's
            if before is None or self.find(before) is None:
                return self.plain(value)
            self.set_data(before, value)
        return before

    def _pop(self) -> None:
        assert self._modes is not None
        self._modes.close()
        self._modes = None

    def _end(self, waits: bool) -> None:
        self.pending = True
        changed = set(self._written)
        try:
            if waits or self._written:
                self.settle()
            self.tensors.write_back(changed)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Copies are old as soon as other code runs."""
        self._copies.clear()
        self.tensors.forget_gradients()

    # ---- where ranks meet ----

    def _meet(self, why: int, key: int, what: str, wanted: Sequence[GlobalTensor] = ()) -> Served | None:
        """Come for ``what``, and answer the first rank as long as it alone asks for values. Collective.

        Returns:
            None if all ranks have come for the same, as ``key`` tells. Else this is the first one, which alone did,
            and gets what the others serve; or all of them ask for names of gradients.

        Raises:
            GlobalViewError: on every rank: they have come for what does not fit.
        """
        local = from_numbers([why, key], torch.int64, self._host.device)
        while True:
            rows = [torch.empty_like(local) for _ in range(self._host.group.size())]
            dist.all_gather(rows, local, group=self._host.group)
            requests = torch.stack(rows).tolist()
            first = requests[0]
            are_equal = all(request == first for request in requests)
            if are_equal and why != _GRADIENTS:
                return None
            served = self._serve(first[0] != _END, what, wanted)
            if are_equal or self.rank == 0:
                return served

    def _serve(self, may_ask: bool, what: str, wanted: Sequence[GlobalTensor]) -> Served:
        """Send what the first rank alone asks for: parameters, gradients and buffers. Collective.

        Args:
            may_ask: the first rank has come for values, not to go on.
            what: this rank is here for, in words.
            wanted: on the first rank; on the others nothing counts.
        """
        names = [tensor.global_storage.name for tensor in wanted]
        everyones = gather((what, names, self._written, self.tensors.with_gradient()), self._host.group)
        _, names, written, _ = everyones[0]
        for _, _, theirs, _ in everyones:  # what other ranks have changed since cannot be sent as it was
            may_ask = may_ask and all(name and theirs.get(name) == written.get(name) for name in names)
        if not may_ask:
            lines = "; ".join(f"rank {rank} {of_rank[0]}" for rank, of_rank in enumerate(everyones))
            raise GlobalViewError(
                f"The ranks of a pipeline do different things in a hook or callback: {lines}. {_CURE}"
            )
        values = self._values_of([self.tensors.named(name) for name in names])
        return Served(values, [name for _, _, _, gradients in everyones for name in gradients])

    def names_with_gradient(self) -> list[str]:
        """The parameters that have one, on whatever rank. Collective."""
        served = self._meet(_GRADIENTS, 0, f"needs gradients at {user_location()}")
        assert served is not None
        return served.with_gradient

    # ---- tensors ----

    def remember(self, tensor: GlobalTensor) -> None:
        """It becomes a plain one when the view closes, if it is still there."""
        self._alive[next(self._numbers)] = tensor

    def run(self, call: Call) -> Any:
        """The result of an operator call that has global tensors among its arguments."""
        return run_operator(self, call)

    def as_global(self, structure: Any) -> Any:
        """``structure`` with global tensors in place of the module's parameters and buffers."""

        def replaced(leaf: Any) -> Any:
            found = self.find(leaf)
            return leaf if found is None else self.tensors.as_global(found)

        return map_leaves(replaced, structure)

    def own_object(self, tensor: GlobalTensor) -> Tensor:
        """The module's own tensor, if ``tensor`` is what stands for it; else ``tensor``."""
        found = self.tensors.by_name.get(tensor.global_storage.name or "")
        return found.tensor if found is not None and found.global_tensor is tensor else tensor

    # ---- changes ----

    def changed(self, tensor: GlobalTensor, key: int) -> None:
        """An operation has changed ``tensor``; ``key`` tells how."""
        storage = tensor.global_storage
        storage.key = key
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
            raise GlobalViewError(
                f"`.data` of a tensor of shape {tuple(target.shape)}, {target.dtype} is set at {user_location()} to "
                f"shape {tuple(value.shape)}, {value.dtype}. In a pipeline only that of a parameter or buffer can be "
                "set, and shape and dtype have to stay. Use `.copy_()`."
            )
        # `value` is on one rank or on all; the owner takes it, and the other holders get it at the hook's end.
        local = self.tensors.at_owner(found, value)
        if self.rank in found.ranks:
            found.tensor.data = torch.empty_like(found.tensor) if local is None else local.detach()
        current = self.tensors.as_global(found)  # has other memory now
        key = value.global_storage.key if isinstance(value, GlobalTensor) else 0
        self.changed(current, key_of("data", key, current.global_storage.key))

    # ---- values ----

    def plain(self, structure: Any) -> Any:
        """``structure`` with plain tensors, this rank's own, in place of global ones. Collective if there are any."""
        with without_torch_function():
            values = self.fetch([leaf for leaf in leaves(structure) if isinstance(leaf, GlobalTensor)])

            def value_of(leaf: Any) -> Any:
                if not isinstance(leaf, GlobalTensor):
                    return leaf
                return values[id(leaf)].detach().requires_grad_(leaf.requires_grad)

            return map_leaves(value_of, structure) if values else structure

    def plain_result(self, result: Any, arguments: Sequence[Any]) -> Any:
        """A hook's result without global tensors; nor are any left in a checkpoint among its ``arguments``."""
        for argument in arguments:
            if isinstance(argument, dict):
                for key in list(argument):
                    argument[key] = self.plain(argument[key])
        return self.plain(result)

    def fetch(self, tensors: Sequence[GlobalTensor]) -> dict[int, Tensor]:
        """By ``id``, the values of ``tensors`` on every rank, not to be written. Collective, unless fetched before."""
        contents = [(tensor.global_storage, tensor.global_storage.key, tensor.extent) for tensor in tensors]
        # What is missing is decided by copies, never by `local`: so all ranks, the owner too, decide alike and meet.
        missing = {what: tensor for what, tensor in zip(contents, tensors, strict=True) if what not in self._copies}
        copies = self._copies
        if missing:
            wanted = list(missing.values())
            names = ", ".join(tensor.describe() for tensor in wanted[:3])
            key = key_of([(key, extent) for _, key, extent in missing])
            served = self._meet(_VALUES, key, f"needs the values of {names} at {user_location()}", wanted)
            if served is None:
                copies.update(zip(missing, self._values_of(wanted), strict=True))
            else:  # whole parameters, gradients and buffers, of which `wanted` are views; on this rank alone
                copies = dict(copies)
                for what, value in zip(missing, served.values, strict=True):
                    shape, strides, offset, dtype = what[2]
                    whole = value.view(dtype)  # itself a part of a larger one, such as a bucket of gradients
                    copies[what] = whole.as_strided(shape, strides, whole.storage_offset() + offset)
        return {id(tensor): copies[what] for what, tensor in zip(contents, tensors, strict=True)}

    def broadcast(self, owned: Iterable[tuple[int, Tensor]]) -> None:
        """Write into each tensor what it is on the rank that is given with it: one broadcast a rank. Collective.

        ``owned``: owners and tensors, in the same order on all ranks.
        """
        by_owner: dict[int, list[Tensor]] = {}
        for owner, tensor in owned:
            by_owner.setdefault(owner, []).append(tensor)
        for owner, tensors in sorted(by_owner.items()):
            broadcast_tensors(tensors, self.group, owner, self.device)

    def share_buffers(self, trains: bool) -> None:
        """All ranks get what hooks have changed, and unless a training step follows, what these may have changed.

        Every rank holds every buffer, but a change is made by one rank: by its owner in a hook, by the stage that does
        it in a step. Collective if there is anything to send.
        """
        wanted = set(self.changed_buffers)
        if self.has_trained and not trains:
            wanted.update(self.ownership.buffers)
            self.has_trained = False
        if wanted:
            buffers = [(name, buffer) for name, buffer in self.module.named_buffers() if name in wanted]
            self.broadcast((self.ownership.buffers[name], buffer.detach()) for name, buffer in buffers)
            self.changed_buffers.clear()

    def _values_of(self, tensors: Sequence[GlobalTensor]) -> list[Tensor]:
        """Each one's values on every rank. Collective."""
        values = []
        for tensor in tensors:
            local = tensor.local
            values.append(torch.empty_like(tensor.meta, device=self.device) if local is None else local.detach())
        owners = [tensor.owner for tensor in tensors]
        self.broadcast(zip(owners, values, strict=True))
        return values

    # ---- the end ----

    def close(self) -> None:
        """Give all global tensors that still exist their values, as plain tensors. Collective."""
        self.settle()
        gc.collect()  # what is alive has to be the same on all ranks
        kept = [tensor for _, tensor in sorted(self._alive.items())]
        # Where ranks have kept other tensors, as one has run other code, using them stays an error.
        everyones = gather([(tensor.global_storage.key, tensor.extent) for tensor in kept], self._host.group)
        if any(theirs != everyones[0] for theirs in everyones):
            return
        for tensor in kept:
            _make_plain(tensor, *self._values_of([tensor]))


def _make_plain(tensor: GlobalTensor, value: Tensor) -> None:
    """Turn the object into an ordinary tensor or parameter of this ``value``."""
    plain = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    swap_contents(tensor, value.requires_grad_(tensor.requires_grad))
    vars(tensor).clear()
    cast(Any, tensor).__class__ = plain
