"""The whole of a divided module, for code that all ranks of a pipeline run alike. See the package's docstring."""

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
from lightning_smddp.pipeline.capture.ops import user_location
from lightning_smddp.pipeline.mesh import Channel, Ownership
from lightning_smddp.pipeline.view.global_tensor import GlobalStorage, GlobalTensor, GlobalViewError, key_of
from lightning_smddp.pipeline.view.module_tensors import GRADIENT, ModuleTensor, ModuleTensors, ViewGradients
from lightning_smddp.pipeline.view.operations import (
    Operations,
    ViewFunctions,
    ViewOperations,
    refuse_new_parameters,
    values_into_buffers,
)
from lightning_smddp.pipeline.view.rendezvous import Rendezvous, Request, needed_alone
from lightning_smddp.wire.pytree import leaves, map_leaves
from lightning_smddp.wire.stream import Spec, broadcast_tensors


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
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.changed_buffers: set[str] = set()
        self.pending = False
        self.is_used = False
        self.tensors = ModuleTensors(module, ownership, self)
        self.find = self.tensors.find
        self.rendezvous = Rendezvous(host or Channel(group, device), self._answer)
        self.gradients = ViewGradients(self)
        self.run = Operations(self).run
        self._alive: weakref.WeakValueDictionary[int, GlobalTensor] = weakref.WeakValueDictionary()
        self._made = 0  # tensors
        self._copied: weakref.WeakSet[GlobalStorage] = weakref.WeakSet()
        self._modes: ExitStack | None = None
        self._functions = ViewFunctions(self)
        self._operators = ViewOperations(self)
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
        """Before a collective of training: answer the first rank, if it is still in a hook. Collective if it may be."""
        if self.pending:
            self.pending = False
            self.rendezvous.end()

    def _push(self) -> None:
        self.is_used = False
        self._modes = ExitStack()
        # torch's hooks for registrations are called for every module there is; these two look for those of ours.
        hooks = nn.modules.module
        handles = [
            hooks.register_module_parameter_registration_hook(refuse_new_parameters(self._modules)),
            hooks.register_module_buffer_registration_hook(values_into_buffers(self, self._modules)),
        ]
        for handle in handles:
            self._modes.callback(handle.remove)
        # Functions above autograd see the module's own parameters, and put global tensors in their place; autograd's
        # operators on these come to the dispatch mode below, which knows where values are.
        self._modes.enter_context(cast(Any, self._operators))
        self._modes.enter_context(cast(Any, self._functions))

    def _pop(self) -> None:
        assert self._modes is not None
        self._modes.close()
        self._modes = None

    def _end(self, waits: bool) -> None:
        self.pending = True
        changed = {None, *self.rendezvous.written}
        try:
            if waits or self.rendezvous.written:
                self.settle()
            if self.is_used:
                self.tensors.share(changed)
                self.gradients.write_back(changed)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Copies are old as soon as other code runs."""
        for storage in list(self._copied):
            storage.copies.clear()
        self._copied.clear()
        if self.is_used:
            self.gradients.forget()

    # ---- tensors ----

    def remember(self, tensor: GlobalTensor) -> None:
        """It becomes a plain one when the view closes, if it is still there."""
        self._made += 1
        self._alive[self._made] = tensor

    def as_global(self, structure: Any) -> Any:
        """``structure`` with global tensors in place of the module's parameters and buffers."""
        if not any(self.find(leaf) for leaf in leaves(structure)):
            return structure

        def replaced(leaf: Any) -> Any:
            found = self.find(leaf)
            return leaf if found is None else self.tensors.as_global(found)

        return map_leaves(replaced, structure)

    def own_object(self, tensor: GlobalTensor) -> Tensor:
        """The module's own tensor, if ``tensor`` is what stands for it; else ``tensor``."""
        found = self.tensors.by_name.get(tensor.global_storage.name or "")
        if found is not None and found.global_tensor is tensor:
            return found.tensor
        return tensor

    # ---- changes ----

    def note_write(self, tensor: GlobalTensor, key: int) -> None:
        """An operation has changed ``tensor``; ``key`` tells how."""
        storage = tensor.global_storage
        storage.written(key)
        if storage.name is not None:
            self.rendezvous.note_write(storage.name, key)
            if storage.name in self.tensors.buffers:
                self.changed_buffers.add(storage.name)

    def set_data(self, target: Tensor, value: Tensor) -> None:
        """What ``target.data = value`` does.

        A parameter or buffer of the module takes over the values, on the ranks that hold it; any other global tensor
        becomes what ``value`` is.

        Raises:
            GlobalViewError: ``value`` has another shape or dtype, or is no global tensor for a ``target`` that is one.
        """
        found = self.find(target)
        is_alike = value.shape == target.shape and value.dtype == target.dtype
        if not is_alike or (found is None and not isinstance(value, GlobalTensor)):
            described = repr(found.name) if found is not None else cast(GlobalTensor, target).describe()
            raise GlobalViewError(
                f"`.data` of {described} is set at {user_location()} to a tensor of another kind: from shape "
                f"{tuple(target.shape)}, {target.dtype} to {tuple(value.shape)}, {value.dtype}. In a pipeline shape "
                "and dtype have to stay, and tensors made of parameters stay such. Use `.copy_()`."
            )
        if found is None:
            for name in ("owner", "local", "meta", "global_storage"):
                setattr(target, name, getattr(value, name))
            return
        # `value` is on one rank or on all; the owner takes it, and the other holders get it from there.
        current = self.tensors.as_global(found)
        key = value.global_storage.key if isinstance(value, GlobalTensor) else 0
        if isinstance(value, GlobalTensor) and value.owner != found.owner:
            value = self.fetch([value])[0]
        local = value.local if isinstance(value, GlobalTensor) else value.detach().clone()
        if self.rank in found.ranks:  # others than the owner get their values at the hook's end
            found.tensor.data = torch.empty_like(found.tensor) if local is None else local.detach()
        self.note_write(current, key_of("data", key, current.global_storage.key))
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
            if tensor.extent not in tensor.global_storage.copies:
                missing[id(tensor.global_storage), tensor.extent] = tensor
        if missing:
            self._fetch_missing(list(missing.values()))
            self._copied.update(tensor.global_storage for tensor in missing.values())
        values = []
        for tensor in tensors:
            copy = tensor.global_storage.copies[tensor.extent]
            values.append(copy if tensor.local is None else tensor.local)
        return values

    def _fetch_missing(self, missing: Sequence[GlobalTensor]) -> None:
        names = ", ".join(tensor.describe() for tensor in missing[:3])
        key = key_of([(tensor.global_storage.key, tensor.extent) for tensor in missing])
        if not self.rendezvous.meet(Request.VALUES, f"the values of {names} at {user_location()}", key):
            for tensor, copy in zip(missing, self._exchange(missing), strict=True):
                tensor.global_storage.copies[tensor.extent] = copy
            return
        by_owner: dict[int, list[GlobalTensor]] = {}
        for tensor in missing:
            by_owner.setdefault(tensor.owner, []).append(tensor)
        for owner, chosen in sorted(by_owner.items()):
            values = [self._room_or_values(tensor) for tensor in chosen]
            broadcast_tensors([Spec.of(value) for value in values], values, self.group, owner, self.device)
            for tensor, value in zip(chosen, values, strict=True):
                tensor.global_storage.copies[tensor.extent] = value

    def _room_or_values(self, tensor: GlobalTensor) -> Tensor:
        """A contiguous tensor: on the owner of ``tensor`` its values, elsewhere room for them."""
        if tensor.local is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return tensor.local.detach().contiguous()

    def of_owner(self, value: Any, owner: int, what: str, key: int) -> Any:
        """What ``owner`` has found out, which is no tensor, on every rank. Collective."""
        if not self.rendezvous.meet(Request.VALUES, what, key):
            self._exchange([], f"Rank 0 of the pipeline alone asks for {what}. Do so on all ranks.")
        return self.rendezvous.broadcast(value, owner)

    # ---- what the first rank alone asks for ----

    def _exchange(self, wanted: Sequence[GlobalTensor] | None, problem: str | None = None) -> list[Tensor]:
        """The values of ``wanted``, which the first rank alone asks for; None on the others, which answer. Collective.

        Raises:
            GlobalViewError: on every rank, if the values are none of the module's, or with this ``problem``.
        """
        changes: dict[str, int | None] = {}  # what this rank has done to each
        for tensor in wanted or ():
            name, dtype = tensor.global_storage.name, tensor.extent[-1]
            if name is None or str(self._named(name).tensor.dtype) != dtype:
                problem = problem or needed_alone(f"{tensor.describe()} at {user_location()}", 0)
            else:
                changes[name] = self.rendezvous.written.get(name)
        changes, problem, place = self.rendezvous.broadcast((changes, problem, user_location()), 0)
        # The others may have gone on and changed it. All ranks hear of that before anything is sent.
        outdated = [name for name, change in changes.items() if self.rendezvous.written.get(name) != change]
        if problem is None and outdated:
            problem = needed_alone(f"{outdated[0]!r} at {place}, which other ranks have changed since,", 0)
        for reported in self.rendezvous.gather(problem):
            if reported is not None:
                raise GlobalViewError(reported)
        received = {name: self._sent(name) for name in changes}
        values = []
        for tensor in wanted or ():
            shape, strides, offset, _ = tensor.extent
            values.append(received[str(tensor.global_storage.name)].as_strided(shape, strides, offset))
        return values

    def _answer(self, request: Request) -> None:
        """Take part in what the first rank asks for alone. Collective."""
        if request is Request.GRADIENTS:
            self.gradients.announce()
        else:
            self._exchange(None)

    def _named(self, name: str) -> ModuleTensor:
        """The parameter or buffer of this name, or the parameter whose gradient it is."""
        return self.tensors.by_name[name.removeprefix(GRADIENT)]

    def _sent(self, name: str) -> Tensor:
        """A parameter, buffer or gradient on all ranks, laid out as on its owner. Collective."""
        found = self._named(name)
        like = found.tensor
        values = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)
        if found.owner == self.rank:
            source = self.gradients.here(found) if name.startswith(GRADIENT) else like.detach()
            if source is not None:
                values.copy_(source)
        broadcast_tensors([Spec.of(values)], [values], self.group, found.owner, self.device)
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
        counts = {what: len(tensors) for what, tensors in kept.items()}
        everyones = self.rendezvous.gather(counts)
        for what in sorted(counts.keys() & set.intersection(*map(set, everyones)), key=repr):
            if all(theirs[what] == counts[what] for theirs in everyones):
                for tensor in kept[what]:
                    self._make_plain(tensor)
        for found in self.tensors.by_name.values():
            found.global_tensor = None

    def _make_plain(self, tensor: GlobalTensor) -> None:
        """Turn the object into an ordinary tensor or parameter with its values. Collective."""
        value = self._room_or_values(tensor)
        broadcast_tensors([Spec.of(value)], [value], self.group, tensor.owner, self.device)
        plain = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
        swap_contents(tensor, value.requires_grad_(tensor.requires_grad))
        for name in ("global_view", "owner", "local", "meta", "global_storage"):
            vars(tensor).pop(name, None)
        cast(Any, tensor).__class__ = plain
