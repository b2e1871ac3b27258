"""``Trainer(strategy="smddp_deepspeed")``: Lightning's DeepSpeedStrategy with one process's numbers, on any device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp._compat.trainer import will_step
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.nonfinite import NonFinite
from lightning_smddp.communication.tensors import broadcast_tensors
from lightning_smddp.deepspeed.start import (
    UnseenWrites,
    for_cpu,
    own_config,
    require_deepspeed,
    require_stage,
    take_hooks_off,
    take_up_writes,
    use_device,
)
from lightning_smddp.deepspeed.whole_states import WholeStates, parameter_groups
from lightning_smddp.strategies.base import TrainerStrategy
from lightning_smddp.strategies.checks import callbacks_of, require_elementwise, require_supported_by_deepspeed
from lightning_smddp.strategies.options import (
    CommunicationOptions,
    ReliabilityOptions,
    Resume,
    StrategyOptions,
    arguments_of,
    by_name,
)
from lightning_smddp.strategies.tables import say
from lightning_smddp.wording import counted

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy as _Base
else:
    _Base = object


class DeepSpeedParallel(TrainerStrategy, _Base):
    """DeepSpeed's ZeRO with the numbers of one process: optimizer states, gradients or parameters are sharded.

    Args:
        *args: arguments of ``DeepSpeedStrategy``, in its order.
        config: DeepSpeed's configuration: a dict, the path of a JSON file, or None for one made of the arguments.
        resume: ``"auto"`` continues from the newest valid checkpoint when ``fit`` is not given one; None is ``"auto"``
            in a SageMaker job, else ``"never"``.
        communication: timeouts, what is printed, how ranks' batches count.
        reliability: faults, stops and checkpoints.
        **kwargs: arguments of ``DeepSpeedStrategy``, by name: ``stage``, ``offload_optimizer``, ...

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        TypeError: an argument belongs into a group of options; the message says what to write.
        ValueError: an argument is not one of the valid values; the message lists them.
    """

    # Lightning's `DeepSpeedStrategy` extends `DDPStrategy`, whose start knows devices other than CUDA's.
    _lightnings: ClassVar[type[Any]]
    handles_gradient_accumulation = False  # Lightning steps behind the last batch of an epoch, too, as in one process
    lightning_restore_optimizer = True  # its state is in the file
    _is_divided = True
    _engine: Any = None  # until the next run: what was trained can be saved behind its end
    _unseen_writes: UnseenWrites
    _broadcasts_buffers: bool
    _loss: Any = 0.0  # of all backward passes since the last step

    def __init__(
        self,
        *args: Any,
        resume: Resume = None,
        communication: CommunicationOptions = CommunicationOptions(),
        reliability: ReliabilityOptions = ReliabilityOptions(),
        **kwargs: Any,
    ) -> None:
        require_deepspeed()
        kwargs = by_name(self, super().__init__, args, kwargs, arguments_of(self._lightnings))
        options = StrategyOptions.of(communication, reliability, resume=resume)
        if options.reliability.sharded:
            raise ValueError("sharded=True cannot be used with DeepSpeed: leave it out, or use strategy='smddp_fsdp'.")
        require_stage(kwargs.get("stage", 2))
        super().__init__(**kwargs)
        # Sizes of buckets that the user has given stay on CPUs: as arguments, or in a configuration of his own, beside
        # which Lightning does not use them.
        has_own = kwargs.get("config") is not None or self.DEEPSPEED_ENV_VAR in os.environ
        self._sizes_given = frozenset((self.config or {}).get("zero_optimization", {}) if has_own else kwargs)
        self.config = own_config(self.config)
        self._groups: list[list[torch.nn.Parameter]] = []
        self._hold_parts(options)

    # ---- start, on any device ----

    @property
    @override
    def root_device(self) -> torch.device:
        """With a number on CPU, too: Lightning hands it to DeepSpeed, which needs one."""
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def _set_up_environment(self) -> None:
        use_device(self.root_device)
        super(self._lightnings, self).setup_environment()

    def _join_process_group(self) -> None:
        super(self._lightnings, self).setup_distributed()
        self._init_deepspeed_distributed()

    @override
    def _format_config(self) -> None:
        super()._format_config()
        assert self.config is not None
        if self.root_device.type == "cpu":
            for_cpu(self.config, self._sizes_given)

    @override
    def _auto_select_batch_size(self) -> int:
        """For the throughput that DeepSpeed logs. Loaders of ready batches (``batch_size=None``) have none."""
        try:
            return super()._auto_select_batch_size()
        except AttributeError:
            return 1

    # ---- the engine ----

    def _set_up_model(self, trainer: Trainer) -> None:
        if trainer.state.fn == "fit":
            require_supported_by_deepspeed(self._module, callbacks_of(trainer))
        self._broadcasts_buffers = True  # whatever a run before this one has left
        super()._set_up_model(trainer)

    @override
    def _init_optimizers(self) -> Any:
        optimizer, scheduler = super()._init_optimizers()
        require_elementwise(optimizer)
        self._groups = parameter_groups(optimizer, self._module)
        return optimizer, scheduler

    @override
    def init_deepspeed(self) -> None:
        """Make this run's engine, behind the end of that of the run before it."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            self.optimizers = []
        self._groups = parameter_groups(None, self._module)  # until `_init_optimizers`, which need not come
        super().init_deepspeed()
        self._engine = self.model

    @property
    @override
    def deepspeed_engine(self) -> Any:
        """That of the last run, also behind its end."""
        return self._engine

    def _release_model(self) -> None:
        if self._engine is not None:
            take_hooks_off(self._engine)
            self.model = self.lightning_module

    # ---- training ----

    def _step(self, hook: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As under DDP the first rank's buffers go to all before it, but not in the middle of an accumulation."""
        if self._broadcasts_buffers and self._trainer.state.fn == "fit":
            broadcast_tensors(list(self._module.buffers()), world(), 0, self.root_device)
        self._broadcasts_buffers = hook == "training_step" and will_step(self._trainer)
        return super()._step(hook, args, kwargs)

    def _training_starts(self) -> None:
        self._unseen_writes = UnseenWrites(self._module)  # a checkpoint was loaded
        communication, accumulated = self._communication, self._trainer.accumulate_grad_batches
        weighs = communication.loss_weight not in (None, "sum")
        if accumulated > 1 and (weighs or communication.uneven == "join"):
            option = f"loss_weight={communication.loss_weight!r}" if weighs else "uneven='join'"
            raise ValueError(
                f"{option} cannot be used with accumulate_grad_batches={accumulated} and strategy="
                "'smddp_deepspeed', whose gradients are DeepSpeed's. Leave out one, or use strategy='smddp_fsdp'."
            )
        if self._speaks:
            stage = self.deepspeed_engine.zero_optimization_stage()
            say(f"smddp_deepspeed: ZeRO's stage {stage} on {counted(self.world_size, 'rank')}", self._trainer)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Nothing: :meth:`backward` tells DeepSpeed, which cannot put off what sharded gradients need."""
        return nullcontext()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Accumulate where Lightning does. It has divided the loss by the number of batches: DeepSpeed must not."""
        steps = will_step(self._trainer)
        self.deepspeed_engine.set_gradient_accumulation_boundary(steps)
        self._loss = self._loss + closure_loss.detach()
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """DeepSpeed leaves a step out, without a word, if a gradient is not finite: what that means is asked for."""
        engine = self.deepspeed_engine

        # DeepSpeed steps a copy of this rank's part in fp32, and writes that over the parameters. So between the
        # closure and the step, what hooks have written to parameters goes into the copy, or, where that is not
        # possible, is an error.
        def written() -> Any:
            result = closure()
            if not take_up_writes(engine):
                self._unseen_writes.require_none()
            return result

        result = super().optimizer_step(optimizer, written, model, **kwargs)
        self._unseen_writes.note()
        loss, self._loss = self._loss, 0.0
        if not engine.was_step_applied() and not engine.fp16_enabled():  # fp16 tries what is too large on purpose
            own = {} if bool(loss.isfinite().all()) else {"the loss": str(loss.tolist())}
            found = NonFinite({"a parameter": "DeepSpeed does not say which"}, own)
            self._guard.left_out(found, self._checks.where(), world())
        return result

    # ---- checkpoints ----

    @property
    def _states(self) -> WholeStates:
        optimizer = self.optimizers[0] if self.optimizers else None
        return WholeStates(self._module, optimizer, self._groups, self.is_global_zero)

    def _model_state(self) -> dict[str, Any]:
        return self._states.whole_module_state()

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._states.whole_optimizer_state()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole module's state."""
        self._states.load_module_state(checkpoint["state_dict"], strict)

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        self._states.load_optimizer_state(checkpoint["optimizer_states"][0])
