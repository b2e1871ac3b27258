"""Private parts of torch and of torchmetrics, each with its reason and the condition for its removal."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.data._utils.worker import _worker_loop

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

# The operator of copies in another type, autocast's too. Remove when one has a public name.
CAST = torch.ops.aten._to_copy.default
# The operator that reads a tensor of one element as a number. Remove when it has a public name.
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
# What torch makes as a view with a mark that kernels heed, and the operator that computes it. Remove as above.
WITHOUT_MARKS = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def share_storage(tensor: Tensor) -> int:
    """Move ``tensor``'s whole storage into shared memory, in place, and return the segment's file descriptor.

    Every other view of the storage moves along, which is what makes DDP's own buckets shareable without a copy.
    The file is unlinked before this returns and its space is allocated (no later SIGBUS); the descriptor belongs to
    the storage. Raises ``RuntimeError`` when the shared-memory mount is full.

    Private because the public ``share_memory_()`` picks its strategy from a process-wide setting and hands out no
    descriptor. Remove when torch offers one.
    """
    fd, _size = tensor.untyped_storage()._share_fd_cpu_()
    return cast(int, fd)


def is_loader_worker() -> bool:
    """Whether a ``DataLoader`` has started this process. Remove when ``get_worker_info`` knows from its begin on."""
    return getattr(multiprocessing.current_process(), "_target", None) is _worker_loop


def set_group_timeout(timeout: timedelta) -> None:
    """Give the default group another timeout. Remove when the oldest supported torch has ``set_timeout`` (2.14)."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:
        c10d._set_pg_timeout(timeout)


def default_store() -> dist.Store:
    """The default group's key-value store. Remove when ``torch.distributed`` has a public getter."""
    return c10d._get_default_store()


def new_group_among(
    ranks: list[int], name: str, timeout: timedelta, device: torch.device | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """A group of the global ``ranks`` that they alone have to create; ``name`` is new and the same on all of them.

    With ``device`` (NCCL's) its communicator is made now, else by its first use. Its ``backend`` is the default group's
    unless given.

    The public ``new_group`` has to be called by every rank of the world, or, with ``use_local_synchronization``, makes
    a name out of the ranks that comes again when such a group was destroyed: the new group then finds the old one's
    addresses in the store and hangs. And where the world is bound to a device, both have the new communicator split
    off the world's (``ncclCommSplit``), at its first use even, for which every rank of the world has to come. So the
    world's device is hidden meanwhile: then the members meet by the store. Remove when ``new_group`` takes a name, and
    leaves who is no member alone.
    """
    world = c10d._get_default_group()
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        created, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend or dist.get_backend()),
            default_store(),
            cast(Any, name),
            timeout=timeout,
            device_id=device,
        )
    finally:
        world.bound_device_id = bound
    # Where torch looks up which rank of the group a global rank is: `new_group` would have put it there.
    c10d._world.pg_group_ranks[created] = {member: index for index, member in enumerate(ranks)}
    return cast(dist.ProcessGroup, created)


def abort_nccl() -> None:
    """Abort NCCL's communicators of all groups, so that nobody waits for them; the groups stay, and are of no use.

    For any thread. The public ``destroy_process_group`` waits for all that was launched, which may never end, and
    ``_abort_process_group`` (in torch 2.13) forgets the groups as well: code that still runs, and is
    about to get NCCL's error, would get one of another kind. Remove when there is a public abort of the backends.
    """
    # The newest names first, as in `_abort_process_group`.
    names = c10d._world.pg_names
    groups = sorted(names, key=lambda group: names[group], reverse=True)
    of_nccl: list[Any] = [group for group in groups if is_nccl(group)]
    if not of_nccl:
        return
    # Between a start and an end of NCCL's group calls, as aborts of several communicators may wait for each other else.
    backend = of_nccl[0]._get_backend(torch.device("cuda"))
    together = hasattr(backend, "_group_start")
    if together:
        backend._group_start()
    for group in of_nccl:
        group.abort()
    if together:
        backend._group_end()


def is_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is NCCL's (None: the default group); other backends raise by themselves when a peer fails."""
    return "nccl" in str(dist.get_backend(group))


def abort_and_forget(group: dist.ProcessGroup | None = None) -> None:
    """As ``destroy_process_group`` (None: all groups), but wait for nothing. Remove when there is a public one."""
    c10d._abort_process_group(group)


def swap_contents(tensor: Tensor, other: Tensor) -> None:
    """Exchange memory, device, shape, ``requires_grad`` and ``.grad`` of two tensors; the Python objects stay.

    The public ``torch.utils.swap_tensors`` also exchanges class and attributes, and refuses tensors that a weak
    reference points to, as the memo of every ``FakeTensorMode`` does. ``tensor.data = other`` refuses a tensor on the
    meta device. Hooks registered on a tensor go with its contents. Remove when either can.
    """
    torch._C._swap_tensor_impl(tensor, other)


def write_count(tensor: Tensor) -> int:
    """How often ``tensor`` was written in place; 0 for inference tensors, of which torch does not count it.

    Documented by torch, yet without a public name.
    """
    return 0 if tensor.is_inference() else tensor._version


def initializer(module: nn.Module) -> Callable[[], object] | None:
    """What sets ``module``'s own parameters to their first values: ``reset_parameters``; None if it has none.

    Some of torch's modules (``MultiheadAttention``) call it ``_reset_parameters``; remove when they do not.
    """
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def storage_key(tensor: Tensor) -> StorageWeakRef | None:
    """A reference to ``tensor``'s storage, equal for all its views, that neither keeps nor outlives it unnoticed.

    None for tensors without a storage (sparse, or wrapped by ``torch.func``). ``StorageWeakRef`` is undocumented, and
    ``data_ptr()`` is no substitute: freed memory is used again. Remove when storages can be hashed.
    """
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def checkpoint_region() -> object | None:
    """Which run of a function by ``torch.utils.checkpoint`` (non-reentrant) is around this code; None for none.

    Private because the hooks on saved tensors have no public getter. Remove when checkpointing can be asked.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or "_checkpoint_hook" not in getattr(hooks[0], "__qualname__", ""):
        return None
    return hooks[0]


# `torch.utils._python_dispatch` is documented as the way to extend torch, but has no public name. Remove when it has.
DispatchMode = TorchDispatchMode
# Private because `torch.overrides` can only be left for subclasses, not for modes. Remove when it can.
without_torch_function = torch._C.DisableTorchFunction


_apply_lock = threading.Lock()
_apply_users = 0
_plain_apply = torch.autograd.Function.__dict__["apply"]
_apply_handler = threading.local()  # .call: what `apply` calls in this thread instead


def _visible_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    original = _plain_apply.__get__(None, cls)  # a classmethod, bound to `cls`
    handler = getattr(_apply_handler, "call", None)
    if handler is None and torch._C._len_torch_function_stack() == 0:
        return original(*args, **kwargs)
    if cls is CheckpointFunction:  # as `checkpoint(use_reentrant=True)` calls it
        function, preserve_rng_state, *rest = args
        return checkpoint(function, *rest, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    if handler is not None:
        return handler(cls, original, args, kwargs)
    # The innermost mode gets `apply` as one function, and runs it or not. Within it the stack has one mode less, so
    # that without another one the first branch comes.
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    return handle_torch_function(cls.apply, tensors, *args, **kwargs)


_visible_apply.__name__ = "apply"


@contextmanager
def visible_autograd_functions(handler: Callable[..., Any] | None = None) -> Iterator[None]:
    """Let ``handler``, or function modes, see a call of an ``autograd.Function`` as one operation.

    In this thread ``apply`` calls ``handler(cls, apply, args, kwargs)`` with torch's own; without one modes get it.

    Its forward and backward belong together, so a step must not be cut between operations inside. Reentrant
    checkpoints run as non-reentrant ones, whose operations are ordinary ones. Without a function mode all is as ever.
    Private because ``Function.apply`` takes no part in ``__torch_function__``; remove when it does.
    """
    # The class is one for all threads: the first that comes changes it, and the last that goes puts it back.
    global _apply_users
    before, _apply_handler.call = getattr(_apply_handler, "call", None), handler
    with _apply_lock:
        _apply_users += 1
        setattr(torch.autograd.Function, "apply", classmethod(_visible_apply))  # noqa: B010  mypy knows it as a method
    try:
        yield
    finally:
        _apply_handler.call = before
        with _apply_lock:
            _apply_users -= 1
            if _apply_users == 0:
                setattr(torch.autograd.Function, "apply", _plain_apply)  # noqa: B010


@functools.cache
def pipeline_schedule_class(name: str) -> Any:
    """The schedule class ``name`` of ``torch.distributed.pipelining``, without its initialisation of the stages.

    That initialisation freezes the shapes of a stage's messages for good and takes all receive buffers at once; our
    stages know their shapes at each step. The two names are private: remove when a schedule takes stages of which
    each micro-batch may have other shapes.
    """
    import torch.distributed.pipelining as pipelining

    def leave_to_the_stages(*args: Any, **kwargs: Any) -> None:
        pass

    torchs_class = getattr(pipelining, name)
    skipped = {"_initialize_stage": leave_to_the_stages, "_initialize_stages": leave_to_the_stages}
    return type(name, (torchs_class,), skipped)


def run_pipeline_schedule(schedule: Any, num_microbatches: int, train: bool) -> None:
    """Run one step of a schedule, whose stages have their inputs already.

    Private because the public ``step()`` of torch 2.13 splits its arguments itself and cannot be handed
    micro-batches. Remove when the oldest supported torch has ``step(arg_mbs=...)``.
    """
    no_inputs: list[tuple[Any, ...]] = [()] * num_microbatches
    targets = [None] * num_microbatches if train else None
    schedule._step_microbatches(no_inputs, None, targets, None, return_outputs=False)


def pipeline_order(schedule: Any) -> dict[int, list[tuple[int, Any, int]]]:
    """Rank -> stage, letter and micro-batch of its compute actions, from a multi-stage schedule.

    Remove when torch has a public getter.
    """
    orders = {}
    for rank, actions in schedule.pipeline_order.items():
        computed = [action for action in actions if action is not None]  # else the rank waits
        # A forward and a backward that overlap are one action.
        parts = [part for action in computed for part in action.sub_actions or (action,)]
        orders[rank] = [(part.stage_index, str(part).strip("0123456789"), part.microbatch_index) for part in parts]
    return orders


def without_torch_functions() -> AbstractContextManager[Any]:
    """In this context no function mode and no dispatch mode sees what is done.

    Private because modes can only be left in the order in which they were entered.
    """
    if torch._C._len_torch_dispatch_stack() == 0:  # the usual case, and the quick one
        return torch._C.DisableTorchFunction()  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
    return _without_modes()


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def forward_cache(metric: Metric) -> Any:
    """What ``metric`` last returned for a batch, which Lightning logs as its value of the step. Public nowhere."""
    return metric._forward_cache


def set_forward_cache(metric: Metric, value: Any) -> None:
    """Let ``value`` be what Lightning logs of ``metric`` for this step, see :func:`forward_cache`."""
    metric._forward_cache = value


def set_metric_state(metric: Metric, count: int, state: Mapping[str, Any]) -> None:
    """Give ``metric`` a state, and how many updates have made it; torchmetrics has getters only."""
    vars(metric).update(state)
    metric._update_count, metric._computed = count, None


def initial_metric_state(metric: Metric) -> dict[str, Any]:
    """What ``metric`` begins with. torchmetrics' ``reset`` also drops the value of the batch."""
    return copy.deepcopy(metric._defaults)


def computes_batch_value(metric: Metric) -> bool:
    """Whether ``metric.forward`` is calling ``compute`` for one batch alone. torchmetrics says so nowhere else."""
    return not metric._should_unsync


def keep_compute_groups(collection: MetricCollection) -> None:
    """Give ``collection`` a copy of its compute groups, as it changes them in place. They have a public getter only."""
    collection._groups = copy.deepcopy(collection.compute_groups)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` calls instead of the module; None without, or where hooks are compiled with it.

    Private because a compiled module has no public sign of it. Remove when it has.
    """
    forward = module._forward_hooks or module._forward_pre_hooks
    has_hooks = forward or module._backward_hooks or module._backward_pre_hooks
    return None if has_hooks else module._compiled_call_impl


def hooked_call(module: nn.Module) -> Callable[..., Any] | None:
    """A module's call with all its hooks, if there are full backward hooks, which go around ``forward``; else None.

    Private because a module cannot be asked for its hooks. Remove when it can.
    """
    is_hooked = module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook)
    return module._call_impl if is_hooked else None


COMPILED_CALL = "_compiled_call_impl"  # the attribute of a module that holds it


# A subclass without functions of its own: what torch documents as `_disabled_torch_function_impl`. Remove when public.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl


# A tensor of a class with the looks that are asked for (contiguous without strides), and no memory: documented by torch
# as the way to extend it. Remove when it has a public name.
wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


# Within it torch calls no class of a tensor for its functions; modes see them. Private: the public
# ``DisableTorchFunctionSubclass`` of ``torch._C`` has no other name. Remove when it has.
without_subclass_functions = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class OperatorFacts:
    """What the schema of an operator says.

    Attributes:
        name: with its namespace, without the overload.
        writes: position and name of each argument that it writes.
        num_returns: what it returns.
        only_writes: whether it returns nothing but what it has written.
        makes_tensors: whether what it returns are tensors.
        draws: whether it draws random numbers.
        changes_shape: whether it changes the shape of a tensor in place.
        is_foreach: whether it does the same to each tensor of a list.
    """

    name: str
    writes: tuple[tuple[int, str], ...]
    num_returns: int
    only_writes: bool
    makes_tensors: bool
    draws: bool
    changes_shape: bool
    is_foreach: bool

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments that are written, those in lists each for itself."""
        found: list[Any] = []
        for position, name in self.writes:
            value = kwargs.get(name)
            if position < len(args):
                value = args[position]
            if isinstance(value, (list, tuple)):
                found += value
            elif value is not None:
                found.append(value)
        return found


@functools.lru_cache(maxsize=4096)
def operator_facts(function: Any) -> OperatorFacts:
    """Read the schema of an operator overload (``torch.ops.aten.add.Tensor``). Schemas are private; remove when not."""
    # aten::add_.Tensor(Tensor(a!) self, Tensor other, ...) -> Tensor(a!): `a` is the alias, and `!` says "written". An
    # operator with `out=` has the mark at that argument, and at what it returns of it.
    schema = function._schema
    writes = tuple((position, each.name) for position, each in enumerate(schema.arguments) if _is_written(each))
    return OperatorFacts(
        name=schema.name,
        writes=writes,
        num_returns=len(schema.returns),
        only_writes=bool(writes) and all(_is_written(result) for result in schema.returns),
        makes_tensors=bool(writes) or any("Tensor" in str(result.type) for result in schema.returns),
        draws=torch.Tag.nondeterministic_seeded in function.tags,
        changes_shape=torch.Tag.inplace_view in function.tags,
        is_foreach=schema.name.startswith("aten::_foreach_"),
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)
