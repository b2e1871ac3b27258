"""The whole of a divided module, for code that all ranks of a pipeline run alike. See the package's docstring."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import swap_contents, without_torch_function
from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.view.agreement import Agreement, Ask, SharedRandomState
from lightning_smddp.pipeline.view.leaves import Leaf, Leaves, ViewGradients
from lightning_smddp.pipeline.view.operations import (
    Operations,
    ViewFunctions,
    ViewOperations,
    any_leaf,
    keep_buffers,
    map_tensors,
    refuse_new_parameter,
)
from lightning_smddp.pipeline.view.requests import Requests
from lightning_smddp.pipeline.view.tensor import Call, GlobalTensor, GlobalViewError, Memory
from lightning_smddp.wire.broadcast import Channel, broadcast_json
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.pytree import map_leaves
from lightning_smddp.wire.stream import Spec, broadcast_tensors


class GlobalView:
    """Lets hooks work on a divided module as if it were whole.

    Args:
        module: divided among the ranks of ``group``.
        ownership: who holds what.
        group: the pipeline.
        device: of this rank.
        host: the same ranks as ``group``, for messages without values; None is ``group`` itself.
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
        self.operations = Operations(self)
        self.serial = 0  # of the next tensor that is made
        self.writes = 0  # a digest of the names of what was written, in order
        self.last_write = ""
        self.changed_buffers: set[str] = set()  # whose values their owners alone have
        self._trail = 0  # a digest of the operations in this hook so far
        self._alive: weakref.WeakValueDictionary[int, GlobalTensor] = weakref.WeakValueDictionary()
        self._copied: list[Memory] = []  # those with a copy
        self._parts: dict[tuple[int, int], Tensor] = {}  # by serial and version, copies of views
        self.leaves = Leaves(module, ownership, self)
        meetings = host or Channel(group, device)
        self.agreement = Agreement(self, meetings.group, meetings.device, self._serve)
        self.gradients = ViewGradients(self, self.leaves, self.agreement)
        self.random = SharedRandomState(self, self.agreement)
        self.requests = Requests(
            self,
            self.leaves,
            self.gradients,
            self.random,
            self.agreement,
        )
        self._modes: ExitStack | None = None

    def _serve(self, ask: Ask, ranks: Sequence[int]) -> None:
        """Take part in what ``ranks`` ask for at a meeting, which do not include this one. Collective."""
        self.requests.serve(ask, ranks)

    def run_operator(self, call: Call) -> Any:
        """The result of one operator call, on this rank."""
        return self.operations.run(call)

    # ---- entering ----

    @property
    def is_entered(self) -> bool:
        """Whether user code runs within it now."""
        return self._modes is not None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around a hook, on all ranks of the pipeline. At its end they wait for each other.

        Raises:
            GlobalViewError: on every rank, where the ranks did different things.
        """
        if self.is_entered:
            yield
            return
        # torch's hooks for registrations are called for every module there is; these two look for those of ours.
        handles = [
            nn.modules.module.register_module_parameter_registration_hook(refuse_new_parameter(self.module)),
            nn.modules.module.register_module_buffer_registration_hook(keep_buffers(self)),
        ]
        # A tied parameter's stand-in has one home, whose values alone a hook changes; the other holders get them at
        # the end if the version has grown since here.
        versions = {leaf.name: leaf.memory.version for leaf in self.leaves.shared()}
        self._trail = 0
        self._push()
        try:
            yield
        except BaseException:
            self._pop()
            self._forget()
            raise
        finally:
            for handle in handles:
                handle.remove()
        self._pop()
        self._end(versions)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Around our own code that a hook calls: without the view."""
        if not self.is_entered:
            yield
            return
        # Our own code sees the gradients that the hook has made so far, and may change what copies were taken of.
        self._pop()
        self.gradients.write_back()
        self._forget()
        try:
            yield
        finally:
            self._push()

    def _push(self) -> None:
        self._modes = ExitStack()
        # Functions above autograd see the module's own parameters, and put stand-ins in their place; autograd's
        # operators on these come to the dispatch mode below, which knows where values are.
        self._modes.enter_context(cast(Any, ViewOperations(self)))
        self._modes.enter_context(cast(Any, ViewFunctions(self)))

    def _pop(self) -> None:
        assert self._modes is not None
        self._modes.close()
        self._modes = None

    def _end(self, versions: dict[str, int]) -> None:
        """Wait for the others and give them what they ask for; then bring equal values up to date. Collective."""
        # A rank at its end still serves those that are not: they may need values that only it has. All leave together,
        # with the same serial, so that the next hook's tensors have the same numbers everywhere.
        agreed = self.agreement.meet(Ask.END, str(self.writes))
        while agreed.ask is not Ask.END:
            self._serve(agreed.ask, agreed.ranks)
            agreed = self.agreement.meet(Ask.END, str(self.writes))
        self.serial = agreed.serial
        if not self.agreement.alike:
            lines = []
            for rank, write in enumerate(gather_json(self.last_write or "none", self.group, self.device)):
                lines.append(f"on rank {rank} the last change so far is that of {write}")
            raise GlobalViewError(
                f"The ranks of a pipeline changed different parameters in a hook or callback: {'; '.join(lines)}. What "
                "changes parameters has to run on all ranks, not under `if trainer.is_global_zero:`."
            )
        for leaf in self.leaves.shared():
            if leaf.memory.version == versions[leaf.name]:
                continue
            values: list[Tensor] | None = None
            if self.rank in leaf.holders:
                values = [leaf.tensor.detach()]
            spec = Spec(tuple(leaf.tensor.shape), leaf.tensor.dtype)
            broadcast_tensors([spec], values, self.group, leaf.home, self.device)
        self.gradients.write_back()
        self._forget()

    def _forget(self) -> None:
        """Copies are old as soon as other code runs."""
        for memory in self._copied:
            memory.copy = None
        self._copied.clear()
        self._parts.clear()
        self.random.give_back()
        self.gradients.forget()

    # ---- tensors ----

    def next_serial(self, tensor: GlobalTensor) -> int:
        """A number for a new tensor, the same on all ranks."""
        self.serial += 1
        self._alive[self.serial] = tensor
        return self.serial

    def knows(self, tensor: object) -> bool:
        """Whether it is one of the module's parameters or buffers."""
        return self.leaves.find(tensor) is not None

    def stand_in_for(self, tensor: Tensor) -> GlobalTensor:
        """What a parameter or buffer of the module is within the view."""
        leaf = self.leaves.find(tensor)
        assert leaf is not None
        return self.leaves.show(leaf)

    def stand_in(self, structure: Any) -> Any:
        """``structure`` with stand-ins in place of the module's parameters and buffers."""
        if not any_leaf(self.knows, structure):
            return structure

        def replaced(leaf: Any) -> Any:
            found = self.leaves.find(leaf)
            if found is None:
                return leaf
            return self.leaves.show(found)

        return map_leaves(replaced, structure)

    def own_object(self, tensor: GlobalTensor) -> Tensor:
        """The module's own tensor, if ``tensor`` is its stand-in; else ``tensor``."""
        leaf = self.leaves.by_name.get(tensor.memory.leaf or "")
        if leaf is not None and leaf.shown is tensor:
            return leaf.tensor
        return tensor

    def alias(self, tensor: GlobalTensor) -> GlobalTensor:
        """Another object for the same values."""
        return GlobalTensor(self, tensor.home, tensor.meta.detach(), tensor.local, tensor.memory)

    def note_write(self, tensor: GlobalTensor) -> None:
        """An operation has changed ``tensor``."""
        self.note_change(tensor.memory)

    def note_operation(self, name: str, tensors: Sequence[GlobalTensor]) -> None:
        """What ranks do has to be the same, or they would take each other's values for their own."""
        names = [str(tensor.memory.leaf) for tensor in tensors]
        operation = f"{name} {','.join(names)}"
        self._trail = zlib.crc32(operation.encode(), self._trail)

    def note_change(self, memory: Memory) -> None:
        """What ``memory`` holds has changed."""
        memory.written()
        if memory.leaf is not None:
            self.writes = zlib.crc32(memory.leaf.encode(), self.writes)
            self.last_write = f"{memory.leaf!r} at {user_location()}"
            if memory.leaf in self.leaves.buffers:
                self.changed_buffers.add(memory.leaf)

    def set_data(self, target: Tensor, value: Tensor) -> None:
        """What ``target.data = value`` does.

        A parameter or buffer of the module takes over the values, on the ranks that hold it; any other global tensor
        becomes what ``value`` is.

        Raises:
            GlobalViewError: ``value`` has another shape or dtype, or is no global tensor for a ``target`` that is one.
        """
        leaf = self.leaves.find(target)
        if leaf is not None:
            self._set_leaf(leaf, value)
            return
        assert isinstance(target, GlobalTensor)
        if not isinstance(value, GlobalTensor) or value.shape != target.shape or value.dtype != target.dtype:
            raise GlobalViewError(
                f"`.data` of {target.describe()} is set at {user_location()} to a tensor of another kind: in a "
                "pipeline it has to keep its shape and dtype, and be made of parameters. Use `.copy_()`."
            )
        target.home = value.home
        target.local = value.local
        target.meta = value.meta
        target.memory = value.memory

    def _set_leaf(self, leaf: Leaf, value: Tensor) -> None:
        """The values of a parameter or buffer become ``value``; one of another rank is fetched. Collective then."""
        target = leaf.tensor
        if value.shape != target.shape or value.dtype != target.dtype:
            raise GlobalViewError(
                f"`.data` of {leaf.name!r} is set at {user_location()} from shape {tuple(target.shape)}, "
                f"{target.dtype} to {tuple(value.shape)}, {value.dtype}. A divided module keeps its shapes and dtypes."
            )
        local: Tensor | None
        if not isinstance(value, GlobalTensor):
            local = value.detach().clone()  # what other ranks have of it is not theirs to change
        elif value.home == leaf.home:
            local = value.local
        else:
            local = self.fetch([value])[0]
        # `value` is on one rank or on all; the home takes it, and the other holders get it from the home.
        if leaf.home == self.rank:
            assert local is not None
            leaf.tensor.data = local.detach()
        elif self.rank in leaf.holders:
            leaf.tensor.data = torch.empty_like(leaf.tensor)  # gets its values at the hook's end
        self.note_change(leaf.memory)
        self.leaves.show(leaf)

    def gradient(self, parameter: Tensor) -> Any:
        """What ``parameter.grad`` is: a global tensor, or None. Collective at the first look at any gradient."""
        return self.gradients.get(parameter)

    def set_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """What ``parameter.grad = value`` does. Collective as :meth:`gradient`, and for a ``value`` of another rank."""
        self.gradients.set(parameter, value)

    def share_random_state(self) -> None:
        """From here to the hook's end all ranks draw what the first one draws."""
        self.random.share()

    # ---- values ----

    def plain(self, structure: Any) -> Any:
        """``structure`` with plain tensors, this rank's own, in place of global ones. Collective if there are any."""
        with without_torch_function():
            return self._plain(structure)

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

    def _plain(self, structure: Any) -> Any:
        found: list[GlobalTensor] = []
        map_tensors(found.append, structure)
        if not found:
            return structure
        fetched = self.fetch(found)
        values = {id(tensor): value for tensor, value in zip(found, fetched, strict=True)}

        def value_of(tensor: GlobalTensor) -> Tensor:
            value = values[id(tensor)].detach()
            return value.requires_grad_(tensor.requires_grad)

        return map_tensors(value_of, structure)

    def fetch(self, tensors: Sequence[GlobalTensor]) -> list[Tensor]:
        """The values of ``tensors`` on every rank, not to be written. Collective, unless all were fetched already."""
        # What is missing is decided by copies, never by `local`: so all ranks, the home too, decide alike and meet.
        # Views that show a whole memory are asked for once and share the copy.
        missing: dict[int, GlobalTensor] = {}
        for tensor in tensors:
            if self.copy_of(tensor) is not None:
                continue
            if tensor.is_whole:
                missing[id(tensor.memory)] = tensor
            else:
                missing[tensor.serial] = tensor
        if missing:
            self._ask(list(missing.values()))
        values = []
        for tensor in tensors:
            value = tensor.local
            if value is None:
                value = self.copy_of(tensor)
            assert value is not None
            values.append(value)
        return values

    def copy_of(self, tensor: GlobalTensor) -> Tensor | None:
        """What every rank has of ``tensor``; None if it has not been fetched since it was last written."""
        part = self._parts.get((tensor.serial, tensor.memory.version))
        if part is not None:
            return part
        # The copy lies as the memory does, so any view of it is found by its strides and its offset.
        whole = tensor.memory.copy
        if whole is None or whole.dtype != tensor.dtype:
            return None
        return whole.as_strided(tensor.shape, tensor.meta.stride(), tensor.meta.storage_offset())

    def keep_copy(self, tensor: GlobalTensor, values: Tensor) -> None:
        """``values``, in the shape of ``tensor``, or flat in the order of its memory, are on every rank now."""
        if tensor.is_whole:
            tensor.memory.copy = values.view(-1)
            self._copied.append(tensor.memory)
        else:
            self._parts[tensor.serial, tensor.memory.version] = values.view(tensor.shape)

    def _ask(self, missing: list[GlobalTensor]) -> None:
        # Serials, versions and the trail of operations are the same on ranks that have run the same code. Where they
        # are, every rank knows which tensors the others mean, and the values need no further words.
        names = [tensor.describe() for tensor in missing[:3]]
        versions = [(tensor.serial, tensor.memory.version) for tensor in missing]
        agreed = self.agreement.meet(Ask.VALUES, f"the values of {names} {versions} {self._trail}")
        if len(agreed.ranks) < self.group.size():
            self.requests.exchange(agreed.ranks, missing)
            return
        by_home: dict[int, list[GlobalTensor]] = {}
        for tensor in missing:
            by_home.setdefault(tensor.home, []).append(tensor)
        for home, chosen in sorted(by_home.items()):
            values = [self._to_broadcast(tensor) for tensor in chosen]
            specs = [Spec((tensor.numel(),), tensor.dtype) for tensor in chosen]
            broadcast_tensors(specs, values, self.group, home, self.device)
            for tensor, value in zip(chosen, values, strict=True):
                self.keep_copy(tensor, value)

    def _to_broadcast(self, tensor: GlobalTensor) -> Tensor:
        """A flat tensor: on the home of ``tensor`` its values, elsewhere room for them."""
        if tensor.home != self.rank:
            return torch.empty(tensor.numel(), dtype=tensor.dtype, device=self.device)
        assert tensor.local is not None
        local = tensor.local.detach()
        if tensor.is_whole:  # in the order of its memory, which is the same for all of its views
            return local.as_strided((local.numel(),), (1,), local.storage_offset())
        return local.reshape(-1)

    def tell(self, value: Any, home: int, function: Any) -> Any:
        """What ``home`` has found out, on every rank. Collective."""
        agreed = self.agreement.meet(Ask.VALUES, f"the result of {function} {self._trail}")
        if len(agreed.ranks) < self.group.size():
            self.requests.refuse(agreed.ranks, f"{function} at {user_location()}")
        return broadcast_json(value, self.group, self.device, home)

    # ---- the end ----

    def close(self) -> None:
        """Give all global tensors that still exist their values, as plain tensors. Collective."""
        # Which objects Python has kept alive may differ among ranks, so the ranks go through all serials that any home
        # has, in one order; a rank without the object takes part and throws the values away.
        alive = [[tensor.serial, tensor.home] for tensor in self._alive.values() if tensor.home == self.rank]
        homes: dict[int, int] = {}
        for part in gather_json(alive, self.group, self.device):
            homes.update(part)
        stand_ins = {id(leaf.shown) for leaf in self.leaves.by_name.values()}
        for serial, home in sorted(homes.items()):
            tensor = self._alive.get(serial)
            self._end_life(tensor, home, id(tensor) in stand_ins)
        for leaf in self.leaves.by_name.values():
            leaf.shown = None

    def _end_life(self, tensor: GlobalTensor | None, home: int, is_stand_in: bool) -> None:
        """Turn a tensor that has its values on ``home`` into a plain one. Collective.

        Args:
            tensor: None where this rank has no such object.
            home: its rank.
            is_stand_in: whether it stands for one of the module's own, and is let go as it is.
        """
        facts = None
        if tensor is not None and tensor.home == self.rank and not is_stand_in:
            facts = Spec.of(tensor).to_json()
        facts = broadcast_json(facts, self.group, self.device, home)
        if facts is None:
            return
        spec = Spec.from_json(facts)
        value = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        if tensor is not None and tensor.local is not None:
            value = tensor.local.detach().contiguous()
        broadcast_tensors([spec], [value], self.group, home, self.device)
        if tensor is None:
            return
        if tensor.local is None:
            _make_plain(tensor, value.clone())
        else:
            _make_plain(tensor, tensor.local.detach())


def _make_plain(tensor: GlobalTensor, value: Tensor) -> None:
    """Turn the object ``tensor`` into an ordinary tensor or parameter."""
    plain: type[Tensor] = Tensor
    if isinstance(tensor, nn.Parameter):
        plain = nn.Parameter
    swap_contents(tensor, value.requires_grad_(tensor.requires_grad))
    for name in ("global_view", "home", "local", "meta", "memory", "serial", "recipe"):
        vars(tensor).pop(name, None)
    cast(Any, tensor).__class__ = plain
