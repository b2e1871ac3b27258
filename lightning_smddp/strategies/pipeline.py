"""``Trainer(strategy="smddp_pipeline")``: pipeline parallelism of the module's own ``training_step``.

The main flow: :meth:`PipelineParallel.training_step` -> ``StagedModule.run`` -> ``pipeline/runtime.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_smddp._compat import finetuning_by_identity, keeps_user_samplers
from lightning_smddp._compat_steps import default_group
from lightning_smddp.communication.algorithms import AlgorithmName
from lightning_smddp.communication.compression import Compression, Method
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.full_state import broadcast_initial
from lightning_smddp.pipeline.materialise import parameters_on_meta
from lightning_smddp.pipeline.patches import set_within
from lightning_smddp.pipeline.placement import Groups
from lightning_smddp.pipeline.program import SplitError
from lightning_smddp.pipeline.separate_draws import join_draws
from lightning_smddp.pipeline.verification import Finding
from lightning_smddp.strategies.exact_resume import ExactResume
from lightning_smddp.strategies.guarded import Guarded
from lightning_smddp.strategies.hand_over import arrives_as_expected, connected, factor_of
from lightning_smddp.strategies.hook_view import HookView
from lightning_smddp.strategies.layouts import Place
from lightning_smddp.strategies.nonfinite import by_asking, changes_batch, loss_watchers
from lightning_smddp.strategies.option_checks import refuse_all, require_arguments_of_ddp
from lightning_smddp.strategies.parts import require_whole
from lightning_smddp.strategies.pipeline_checks import (
    callback_against_pipelining,
    callbacks_of,
    manual_optimization,
    require_samplers_of_replicas,
    require_supported,
    without_sync_advice,
    zeroes_as_usual,
)
from lightning_smddp.strategies.pipeline_options import PipelineOptions
from lightning_smddp.strategies.pipeline_saving import PipelineSaving
from lightning_smddp.strategies.reductions import mean_by_sum
from lightning_smddp.strategies.reliability import OnNonfinite, ReliabilityOptions
from lightning_smddp.strategies.sagemaker_folders import SageMakerFolders
from lightning_smddp.strategies.session import DEFAULT_TIMEOUT, Options, Session, check_devices
from lightning_smddp.strategies.staged_module import StagedModule
from lightning_smddp.strategies.supervised import Supervised

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_STEP_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class PipelineParallel(SageMakerFolders, Supervised, Guarded, PipelineSaving):
    """Pipeline parallelism of any LightningModule, split automatically, with data parallelism over the other ranks.

    The first batch shows how the step uses the module's submodules. The step is then cut into stages; each rank
    keeps the parameters of its own, and runs the step's own code on one micro-batch after the other.

    Args:
        pipeline_parallel_size: ranks of a pipeline; None for all. The rest of the world are replicas.
        num_microbatches: in how many parts a batch goes through the pipeline; ``"auto"`` is up to four for each rank.
            Parts may differ in size: gradients are weighted by it.
        schedule: ``"1f1b"``, ``"gpipe"`` (``"simple"``), ``"interleaved_1f1b"`` (``"interleaved"``), ``"looped_bfs"``,
            ``"interleaved_zero_bubble"``, ``"zbv_zero_bubble"``, ``"dualpipev"``.
        stages_per_rank: ``"auto"`` is 1, and 2 for the schedules that have several.
        split: names of the modules that the stages, but the first, begin with; None finds the best ones.
        placement: ``"cluster"`` puts a pipeline on neighbouring ranks, ``"spread"`` puts replicas there.
        active_microbatches: at most so many micro-batches at a time; a step then has several rounds.
        activation_checkpointing: keep only the inputs of modules for backward, and run them again in it.
        meta_init: layers made in ``configure_model`` get no memory until it is known which rank keeps them; their
            first values come from ``reset_parameters``, the same for any number of ranks.
        memory_limit_gb: GiB of a rank for parameters, gradients, optimizer state and activations, when cutting.
        check: compare the pipeline's loss and gradients on one micro-batch with the whole step's before training.
        batch_size_fn: called with a batch, returns its number of rows, for batches that do not show it.
        split_batch: called with a batch and a number of micro-batches, returns them as a list of batches, or of pairs
            of a batch and its number of rows; None asks the module's method of this name, if it has one.
        fallback: for a training step that cannot be pipelined: ``"replicate"`` runs it as a whole on every rank,
            ``"error"`` refuses it.
        algorithm, compression, bucket_cap_mb, process_group_backend, collective_timeout, tuning_cache, verbose: as of
            ``SMDDPStrategy``; they apply to the gradients of replicas.
        init_timeout, stop_grace, resume, on_nonfinite, async_save, sharded: as of ``SMDDPStrategy``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, timeout, start_method: as
            of ``DDPStrategy``; the first five can be given by position, as there.

    Raises:
        ValueError: an argument is not one of the valid values; the message lists them.
    """

    _notebook_name = "smddp_pipeline_notebook"
    _groups: Groups | None = None
    _staged: StagedModule | None = None
    _ended: StagedModule | None = None
    _last_report: CommunicationReport | None = None
    _shown: set[str] | None = None  # steps whose table was printed
    _accumulates = False
    _in_step = False
    _restored: Mapping[str, Any] | None = None  # a checkpoint's weights, until setup

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        pipeline_parallel_size: int | None = None,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "1f1b",
        stages_per_rank: int | Literal["auto"] = "auto",
        split: Sequence[str] | None = None,
        placement: str = "cluster",
        active_microbatches: int | None = None,
        activation_checkpointing: bool = False,
        meta_init: bool = False,
        memory_limit_gb: float | None = None,
        check: bool = True,
        batch_size_fn: Any = None,
        split_batch: Any = None,
        fallback: Literal["replicate", "error"] = "replicate",
        algorithm: AlgorithmName = "auto",
        compression: Method | Compression | None = None,
        bucket_cap_mb: float | None = None,
        process_group_backend: str | None = "auto",
        collective_timeout: timedelta | float | None = None,
        tuning_cache: str | Path | bool = True,
        verbose: bool = True,
        init_timeout: timedelta | float | None = None,
        stop_grace: timedelta | float = 90.0,
        resume: Literal["auto", "never"] | None = None,
        on_nonfinite: OnNonfinite = "error",
        async_save: bool = False,
        sharded: bool = False,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **unknown: Any,
    ) -> None:
        refuse_all(self, unknown)
        communication = Options.parse(
            algorithm, compression, bucket_cap_mb, process_group_backend, collective_timeout, tuning_cache, verbose
        )
        self.options = PipelineOptions.parse(
            pipeline_parallel_size, num_microbatches, schedule, stages_per_rank, split, placement, active_microbatches,
            activation_checkpointing, meta_init, memory_limit_gb, check, batch_size_fn, split_batch, fallback,
            communication,
        )  # fmt: skip
        require_arguments_of_ddp(accelerator, timeout)
        reliability = ReliabilityOptions.parse(init_timeout, stop_grace, resume, on_nonfinite, async_save, sharded)
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, timeout=timeout, start_method=start_method,
            process_group_backend=communication.process_group_backend,
        )  # fmt: skip
        self._session = Session(self.options.communication)
        self._exact_resume = ExactResume()
        self._reliability = reliability
        self._changes = ExitStack()  # of Lightning, until teardown
        self._hook_view = HookView(self, self._current)

    # ---- start and end ----

    def setup_environment(self) -> None:
        """Start the process group and the groups of pipelines and replicas."""
        environment = self.cluster_environment
        check_devices(self.num_processes, environment is not None and environment.creates_processes_externally)
        grid = self.options.grid(self.num_nodes * self.num_processes)
        super().setup_environment()
        self._session.process_group_started()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            self._exact_resume.before_setup(self.lightning_module.trainer, self._reliability.resume, self.root_device)
        if self._groups is None:
            limit = self.options.communication.collective_timeout or self._timeout
            self._groups = Groups.create(grid, limit, self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Take the module as it is; it is divided at the first batch."""
        assert self.accelerator is not None
        assert self.model is not None
        assert self.lightning_module is not None
        assert self._groups is not None
        fits = trainer.state.fn == "fit"
        self.accelerator.setup(trainer)
        one_replica = self._groups.grid.num_replicas == 1
        self._changes.enter_context(keeps_user_samplers(trainer, one_replica))
        self._changes.enter_context(without_sync_advice(one_replica))
        self._changes.enter_context(finetuning_by_identity(callbacks_of(trainer), self._optimized))
        require_whole(self.lightning_module)
        require_supported(self.lightning_module, callbacks_of(trainer), fits, self.options.fallback)
        if fits:
            self.require_no_links(trainer)
        if fits and self._layer_sync and self._groups.grid.num_replicas > 1:
            torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.model, process_group=self._groups.replicas)
        self.precision_plugin.convert_module(self.model)
        assert dist.group.WORLD is not None
        self._require_same_model()
        broadcast_initial(self.lightning_module, dist.group.WORLD, device=self.root_device)
        self._staged = StagedModule(
            self.lightning_module, self.options, self._groups, self.root_device, self._step_context, self._limit
        )
        if self._shown is None:
            self._shown = set()
        self._staged.shown = self._shown
        if self._restored is not None:
            self._staged.load_state_dict(self._restored, strict=False)
            self._restored = None
        self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            self._staged.take_optimizers(self.optimizers, self.precision_plugin)
            self._exact_resume.start(trainer, Place.of(self._groups), self.root_device)
            self._staged.watching, self._staged.marking = self._watches_gradients, not self._changes_gradients
            if not self.lightning_module.automatic_optimization:
                self._staged.replicate(manual_optimization(self.lightning_module))
            elif (reason := self._callback_against_pipelining(trainer)) is not None:
                self._staged.replicate(reason)
        self.take_over(trainer)
        self._changes.enter_context(self._hook_view.installed(trainer))

    def _callback_against_pipelining(self, trainer: Trainer) -> str | None:
        assert self.lightning_module is not None
        return callback_against_pipelining(callbacks_of(trainer), self.lightning_module, self.options.fallback)

    def _current(self) -> StagedModule | None:
        return self._staged

    def _optimized(self, optimizer: Optimizer) -> list[torch.nn.Parameter]:
        return self._last_staged().optimized(optimizer)

    def model_to_device(self) -> None:
        """Move what is not divided yet, if it fits."""
        assert self._staged is not None
        self._staged.to_device()

    def teardown(self) -> None:
        """Give back a whole module, and free groups and memory."""
        self._exact_resume.close()
        if self._staged is not None:
            if not self._interrupted():
                self._last_report = self._staged.report() or self._last_report
            self._staged.close(gather=not self._interrupted())
            if self._groups is not None and not self._interrupted():
                join_draws(self._groups.pipeline, self.root_device)
            self._ended, self._staged = self._staged, None
        self._changes.close()
        self._session.close()
        module = self._lightning_module
        if module is not None and any(p.is_meta for p in module.parameters()):
            self._lightning_module = None  # Lightning moves what it finds here to the CPU, which parts cannot do
        super().teardown()
        self._lightning_module = module

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``meta_init``: parameters get no memory yet."""
        with super().tensor_init_context(empty_init=empty_init), self._meta():
            yield

    def _meta(self) -> AbstractContextManager[None]:
        return parameters_on_meta() if self.options.meta_init else nullcontext()

    def on_train_start(self) -> None:
        """Look at the data's samplers."""
        super().on_train_start()
        self._exact_resume.on_train_start()
        assert self._groups is not None
        require_samplers_of_replicas(self._trainer.train_dataloader, self._groups.grid.num_replicas)

    # ---- steps ----

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move the batch, and note what the host knows of it then; not of what a hook of the user's makes of it."""
        on_host = self.root_device.type == "cpu"  # where the batch itself can be read
        if self._staged is None or on_host or changes_batch(self._trainer):
            return super().batch_to_device(batch, *args, **kwargs)
        with self._staged.host_values.noted():
            return super().batch_to_device(batch, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of all micro-batches; the gradients are handed over in ``backward``."""
        staged = self._require_staged()
        trainer = self._trainer
        batch, *rest = [*args, *kwargs.values()]
        expected = staged.scale() / trainer.accumulate_grad_batches
        accumulates = self._accumulates
        continues = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches != 0
        output = staged.train(batch, rest, expected, continues, zeroes_as_usual(trainer), accumulates)
        if staged.replicated is not None:
            return output

        def deliver(arrived: Tensor) -> None:
            is_known = arrived.is_cuda and arrives_as_expected(trainer)
            staged.deliver(1.0 if is_known else factor_of(arrived, expected), accumulates)

        if isinstance(output, dict):
            return {**output, "loss": connected(output["loss"], deliver)}
        return connected(output, deliver)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch through the pipeline, forward only."""
        return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch through the pipeline, forward only."""
        return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch through the pipeline, forward only; the predictions are on every rank of the pipeline."""
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        staged = self._require_staged()
        batch, *rest = [*args, *kwargs.values()]
        return staged.evaluate(hook, batch, rest, may_wait=self._trainer.state.fn == "fit")

    @contextmanager
    def _step_context(self, hook: str) -> Iterator[None]:
        """Around the user's code of a step: precision, and ranks as ``ddp`` would have them, one for each replica."""
        assert self._groups is not None
        precision = getattr(self.precision_plugin, _STEP_CONTEXTS[hook])()
        with set_within(self, "_in_step", True), precision, default_group(self._groups.replicas):
            yield

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Of a step that runs as a whole, gradients are averaged over replicas before hooks see them."""
        staged = self._require_staged()
        if staged.replicated is None:
            return super().backward(*args, **kwargs)
        assert self._groups is not None
        with staged.replicated.averaging(self._accumulates), default_group(self._groups.replicas):
            return super().backward(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters it around batches that only accumulate."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def _find_nonfinite(self) -> Mapping[str, str] | None:
        found = self._require_staged().nonfinite()
        return by_asking(found, self.root_device) if self._finders is None else found

    def _brought(self) -> Mapping[str, str]:
        return self._require_staged().nonfinite() or {}

    @property
    def _finders(self) -> dist.ProcessGroup | None:
        """Those of one stage: the others hear by the supervision, as asking them in each step costs more than looking.

        They may have taken the step by then; nothing is saved after it. All ranks, where hooks that may change the
        gradients, or callbacks that watch the loss, come in between: these are collective.
        """
        assert self._groups is not None
        alone = self._reliability.on_nonfinite == "error" and self._supervisor is not None
        if alone and not self._changes_gradients and not loss_watchers(self._trainer):
            return self._groups.replicas
        return None

    # ---- ranks ----

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A pipeline is one replica to the sampler."""
        assert self._groups is not None
        return {"num_replicas": self._groups.grid.num_replicas, "rank": self._groups.replica}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Raises ``ValueError`` inside of a step, whose micro-batches reach each rank in turn."""
        if self._staged is not None and self._staged.capture.runs_step:
            raise SplitError(
                "`strategy.barrier()` is called inside of a step that runs as a pipeline. Each rank is at another "
                "micro-batch then, and they would wait for each other for ever. Call it in a hook around the step, "
                "such as `on_train_batch_start`, where all ranks come together."
            )
        super().barrier(*args, **kwargs)

    @property
    def world_size(self) -> int:
        """Number of ranks; within a step that of replicas, as all ranks of a pipeline work on one batch."""
        if self._in_step and self._groups is not None:
            return self._groups.grid.num_replicas
        return super().world_size

    @property
    def global_rank(self) -> int:
        """This rank; within a step the replica's number."""
        if self._in_step and self._groups is not None:
            return self._groups.replica
        return super().global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of all ranks."""
        return super().global_rank == 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Tensors of all replicas, stacked, as all ranks of a pipeline have the same; of ``group``'s ranks if given."""
        if self._groups is None or not (group is None or group is dist.group.WORLD):
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)
        if self.world_size == 1:  # as in one process
            return tensor
        with default_group(self._groups.replicas):
            return super().all_gather(tensor, group=self._groups.replicas, sync_grads=sync_grads)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over replicas, as all ranks of a pipeline have the same values; over ``group`` if given."""
        chosen = group if group is not None or self._groups is None else self._groups.replicas
        return mean_by_sum(super().reduce, tensor, chosen, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if all else bool(votes)

    def __getstate__(self) -> dict[str, Any]:
        """For ``pickle`` and ``copy.deepcopy`` of a Trainer: without what belongs to this process and its run."""
        ended: dict[str, Any] = {
            "_groups": None,
            "_staged": None,
            "_ended": None,
            "_changes": ExitStack(),
            "_shown": None,
        }
        return {**super().__getstate__(), **ended}

    # ---- what users see ----

    @property
    def findings(self) -> list[Finding]:
        """The start-up check's comparisons: the loss, and the norm of each unit's gradient; empty before it."""
        return [] if self._staged is None or self._staged.divided is None else self._staged.divided.findings

    @property
    def parameters_by_rank(self) -> list[int]:
        """How many parameters each rank of a pipeline holds; empty before the module is divided. Not collective."""
        if self._staged is None or self._staged.divided is None:
            return []
        sizes = {name: parameter.numel() for name, parameter in self._staged.module.named_parameters()}
        ownership = self._staged.divided.division.ownership
        return [sum(sizes[name] for name in ownership.held_by(rank)) for rank in range(ownership.num_ranks)]

    @property
    def communication_report(self) -> CommunicationReport | None:
        """What averaging over replicas cost so far; None with one replica. Collective over the replicas."""
        return self._last_report if self._staged is None else self._staged.report()

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _limit(self) -> timedelta:
        return self.options.communication.collective_timeout or self._timeout or DEFAULT_TIMEOUT
