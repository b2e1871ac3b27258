"""``Trainer(strategy="smddp_fsdp")``: parameters, gradients and optimizer states divided among ranks (ZeRO-2 and 3).

torch's FSDP2 (``fully_shard``) divides the module when it is set up, before its optimizers are made:
``sharding/units.py`` finds what is gathered together, ``sharding/fully_sharded.py`` is the module while it is divided,
``sharding/whole_states.py`` makes checkpoints those of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_smddp._compat.trainer import around_hooks, require_hooks_found
from lightning_smddp.communication.nonfinite import NonFinite
from lightning_smddp.pipeline.activations import Checkpointing
from lightning_smddp.pipeline.state.gradients import clipping_by
from lightning_smddp.sharding.optimizer_shards import unwrapped
from lightning_smddp.sharding.units import Wrap
from lightning_smddp.sharding.whole_states import divided_model_state, gathered_model, gathered_optimizer
from lightning_smddp.sharding.whole_view import WholeView
from lightning_smddp.strategies.base import TrainerStrategy
from lightning_smddp.strategies.checks import (
    callbacks_of,
    require_optimizers_of,
    require_supported_by_fsdp,
)
from lightning_smddp.strategies.front import Front
from lightning_smddp.strategies.fsdp_scheme import FSDPScheme, ReduceType, Sharding, ShardingOptions, SteppedOptimizer
from lightning_smddp.strategies.options import (
    CommunicationOptions,
    FromDDP,
    ReliabilityOptions,
    Resume,
    StrategyOptions,
    by_name,
    popped,
)
from lightning_smddp.strategies.tables import print_table

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_FOR_SHARES = frozenset({"configure_optimizers", "optimizer_step", "optimizer_zero_grad"})  # they run optimizers


class FromFSDP(FromDDP, total=False):
    """Arguments beside those in the signature, :class:`FromDDP`'s among them."""

    cpu_offload: bool
    activation_checkpointing: Checkpointing


class ShardedFront(Front):
    """What the Trainer's strategy and Fabric's have in common: arguments, and the steps of optimizers."""

    _known: Iterable[str]  # arguments beside those in the signature
    _stepped: Sequence[SteppedOptimizer] = ()  # until the end of a run

    def __init__(
        self,
        *args: Any,
        sharding: Sharding = "full",
        shard_size: int | None = None,
        wrap: Wrap = None,
        meta_init: bool = False,
        compression: ReduceType | None = None,
        communication: CommunicationOptions = CommunicationOptions(),
        resume: Resume = None,
        reliability: ReliabilityOptions = ReliabilityOptions(),
        **kwargs: Unpack[FromFSDP],
    ) -> None:
        given = by_name(self, super().__init__, args, kwargs, self._known)
        of_memory = popped(given, "cpu_offload", "activation_checkpointing")
        super().__init__(**given)
        self._sharding = ShardingOptions(sharding, shard_size, wrap, meta_init, compression, **of_memory)
        self._meta_init, self._view = meta_init, WholeView()
        self._hold_parts(StrategyOptions.of(communication, reliability, resume=resume))

    def _schemes_of(self, optimizer: Optimizer) -> list[FSDPScheme]:
        """Of the modules that have its parameters."""
        raise NotImplementedError

    def _of(self, optimizer: Any) -> SteppedOptimizer:
        """That of ``optimizer``, which the user's code may have made in mid-training."""
        plain = unwrapped(optimizer)
        for stepped in self._stepped:
            if stepped.optimizer is plain:
                return stepped
        self._stepped = [*self._stepped, SteppedOptimizer(plain, self._schemes_of(plain), self._view)]
        return self._stepped[-1]

    def _close_stepped(self) -> None:
        for stepped in self._stepped:
            stepped.close()
        self._stepped = ()

    def _stepping(self, optimizer: Any) -> AbstractContextManager[None]:
        return self._of(optimizer).stepping()

    def _find_nonfinite(self, optimizer: Any) -> NonFinite | None:
        with self._view.inside(False):
            return self._of(optimizer).nonfinite()


class FullyShardedParallel(ShardedFront, TrainerStrategy):
    """Data parallelism in which each rank keeps its share of the parameters, the gradients and the optimizer's state.

    Torch's FSDP2, for any LightningModule as it is. Units (by default the blocks of a model) are gathered when they
    are needed, and freed behind that.

    Args:
        *args: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io`` and
            ``precision_plugin``, as of ``DDPStrategy``.
        sharding: ``"full"`` frees a unit's parameters behind its forward and gathers them again for its backward pass
            (ZeRO-3); ``"grad_op"`` keeps them in between (ZeRO-2): fewer messages, more memory; ``"hybrid"`` is
            ``"full"`` within groups of ``shard_size`` ranks, each of which has a copy of everything (HSDP).
        shard_size: with ``"hybrid"``: ranks that have one copy among them; None is the ranks of a node.
        wrap: the units: names of modules, classes (themselves or by name), or a function of name and module that
            returns whether it is one; None finds them.
        meta_init: layers made in ``configure_model`` get no memory until they are divided; their first values come
            from ``reset_parameters``, the same for any number of ranks.
        compression: the type in which gradients travel and are summed: ``"bf16"``, ``"fp16"``, or None, the
            precision's own.
        communication, resume, reliability: as of ``SMDDPStrategy``.
        **kwargs: ``activation_checkpointing``, of units: as of ``PipelineStrategy``. Of ``DDPStrategy``: the five
            above, ``process_group_backend``, ``timeout`` and ``start_method``; of ``FSDPStrategy``: ``cpu_offload``,
            with which shares, their gradients and the optimizer's state are in the host's memory, and optimizers step
            there.

    Raises:
        TypeError: an argument is unknown, or belongs into a group of options; the message says what to write.
        ValueError: an argument is not one of the valid values; the message lists them.
    """

    # What code sees of a divided tensor, from the set-up of a run to its end:
    #   steps, hooks of the module and of callbacks            gathered values
    #   backward passes, checkpoints, `configure_optimizers`   this rank's shares
    #   optimizers' steps                                      shares; gathered values if they look at whole parameters
    _is_divided = _has_part_to_save = True
    _scheme: FSDPScheme | None = None  # from setup to teardown
    _whole_again: Mapping[int, Tensor] = {}  # of the last run: by the id of what was a part of it
    _known = FromFSDP.__annotations__

    # ---- start and end ----

    def _set_up_model(self, trainer: Trainer) -> None:
        """Divide the module, then make the optimizers, of its divided parameters."""
        module, is_fit = self._module, trainer.state.fn == "fit"
        trainer.accelerator.setup(trainer)
        if is_fit:
            may_average = not (self._meta_init or self._reliability.sharded)
            require_supported_by_fsdp(module, callbacks_of(trainer), may_average)
            if self._layer_sync:
                self.model = self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        # Divided before the optimizers are made: `configure_optimizers` takes what parameters have become.
        self._scheme = FSDPScheme(
            module, self._sharding, self.precision_plugin, self._view, self.root_device, self.num_processes, self._limit
        )
        self._whole_again = {}
        if is_fit:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._changes.enter_context(clipping_by(self.precision_plugin, self._clip_by_norm))
        # A step that does its backward passes itself goes on behind them, when FSDP2 has divided the root again.
        if is_fit and not module.automatic_optimization:
            self._scheme.sharded.watch_calls()
        self._changes.enter_context(self._view.installed())
        self._changes.enter_context(around_hooks(trainer, self._around_hook))

    def _shard_optimizers(self) -> None:
        require_optimizers_of([self._module], map(unwrapped, self.optimizers))
        self._close_stepped()

    def _schemes_of(self, optimizer: Optimizer) -> list[FSDPScheme]:
        return [self._require_scheme()]

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._of(optimizer).clip_by_norm(clip_val)

    def _release_model(self) -> None:
        """Give back a whole module, if there is room for it and no rank has gone."""
        self._close_stepped()
        scheme, self._scheme = self._scheme, None
        if scheme is not None:
            if not self._interrupted:
                self._whole_again = scheme.make_whole()
            scheme.close()

    def _around_hook(self, hook: str, owners: list[Any]) -> AbstractContextManager[None]:
        """What Lightning enters around the call of a ``hook``: user code sees whole values."""
        # The operators of a DTensor are those of one rank's share: `p.grad.norm().item()` would be another number on
        # each rank, without a word. Inside of the view they are those of the whole.
        return self._view.inside(hook not in _FOR_SHARES)

    # ---- steps ----

    def _step(self, hook: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """With the root's parameters whole."""
        module, scheme = self._module, self._require_scheme()
        require_hooks_found(self._trainer)
        with scheme.forward(hook == "training_step", broadcasts_buffers=self._trainer.state.fn == "fit"):
            result = super()._step(hook, args, kwargs)
        if not module.automatic_optimization:  # its backward passes are behind it
            scheme.sharded.reshard()
        return result

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Lightning enters it around batches that only accumulate."""
        return self._require_scheme().sharded.accumulating()

    @contextmanager
    def _averaging(self, loss: Tensor) -> Iterator[None]:
        scheme = self._require_scheme()
        with self._view.inside(False):
            scheme.sharded.before_backward(loss)
            yield
            scheme.after_backward(self._checks.watches_gradients)

    # ---- checkpoints: those of one process ----

    def _model_state(self) -> dict[str, Any]:
        return gathered_model(self._module.state_dict(keep_vars=True), self._keeps)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return gathered_optimizer(optimizer.state_dict(), self._keeps)

    def _keeps(self, number: int) -> bool:
        """Whether this rank saves what has that number: with ``sharded`` its share, else the first rank all."""
        return self.global_rank == (number % self.world_size if self._reliability.sharded else 0)

    def _optimized(self, optimizer: Optimizer) -> list[Tensor]:
        """Behind a run, whose module is whole again, the parameters that its optimizers had parts of."""
        return [self._whole_again.get(id(parameter), parameter) for parameter in super()._optimized(optimizer)]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole module's state."""
        # Lightning restores before setup, into the whole module, but with `meta_init` behind it: then each rank takes
        # its shares of what the file has.
        if self._scheme is not None:
            state = divided_model_state(self._module, checkpoint["state_dict"])
            checkpoint = {**checkpoint, "state_dict": state}
        super().load_model_state_dict(checkpoint, strict)

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._of(optimizer).load_state_dict(state)

    # ---- what users see ----

    def _training_starts(self) -> None:
        if self._speaks:
            print_table("smddp_fsdp: fully sharded data parallelism", self._require_scheme().describe(), self._trainer)

    def _require_scheme(self) -> FSDPScheme:
        assert self._scheme is not None, "setup() comes first"
        return self._scheme
