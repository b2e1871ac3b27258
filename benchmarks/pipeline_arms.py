"""The arms of ``pipeline_step.py``: the same training step by our strategy, by torch, by DeepSpeed, and in one process.

Each is a callable that runs one step. All of them start from the same parameters and train on the same batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from pipeline_models import Workload
from torch import Tensor, nn

from lightning_smddp import PipelineStrategy

Arm = Callable[[], object]


class Fit:
    """``Trainer.fit`` as an arm: in a thread that trains on one batch at each call.

    The time of a call is that of the whole turn of Lightning's loop, up to its request for the next batch.

    Args:
        workload: what to train.
        strategy: the Trainer's.
        devices: ranks.
    """

    def __init__(self, workload: Workload, strategy: Any, devices: int) -> None:
        self.module = workload.module()
        self.batch = workload.batch
        self.trainer = Trainer(
            strategy=strategy,
            devices=devices,
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[LightningEnvironment()],
        )
        self._go, self._asked = threading.Semaphore(0), threading.Semaphore(0)
        self._ends = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()
        self._wait()

    def __call__(self) -> None:
        """One step."""
        self._go.release()
        self._wait()

    def close(self) -> None:
        """End the fit; the module is whole again."""
        self._ends = True
        self()
        self._thread.join()
        self.module = nn.Sequential(*self.module.layers())

    def stages_begin(self) -> list[str]:
        """The first item of each stage but the first, as the strategy has divided the module."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        plan = strategy._pipelined.partitioned.plan
        return [plan.graph.nodes[stage.begin].name for stage in plan.stages[1:]]

    def __len__(self) -> int:
        return 10**6  # Lightning fetches a batch ahead if it does not know the length

    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            self._asked.release()
            self._go.acquire()
            if self._ends:
                return
            yield self.batch

    def _fit(self) -> None:
        try:
            self.trainer.fit(self.module, self)
        except BaseException as error:
            self._error = error
        finally:
            self._asked.release()

    def _wait(self) -> None:
        self._asked.acquire()
        if self._error is not None:
            raise self._error


class HandWritten:
    """What the documentation of ``torch.distributed.pipelining`` shows, for two stages.

    Args:
        workload: what to train.
        cut: the first layer of the second stage.
        schedule: torch's class.
        num_microbatches: of a batch.
    """

    def __init__(self, workload: Workload, cut: int, schedule: Any, num_microbatches: int) -> None:
        from torch.distributed.pipelining import PipelineStage

        rank = dist.get_rank()
        self.batch = workload.batch
        layers = workload.module().layers()
        self.module = nn.Sequential(*(layers[cut:] if rank else layers[:cut]))
        stage = PipelineStage(self.module, rank, dist.get_world_size(), torch.device("cpu"), group=dist.new_group())
        self.schedule = schedule(stage, num_microbatches, loss_fn=workload.loss)
        self.optimizer = workload.optimizer(self.module.parameters())
        self.losses: list[Tensor] = []

    def __call__(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        if dist.get_rank() == 0:
            self.schedule.step(self.batch[0])
        else:
            self.losses = []
            self.schedule.step(target=self.batch[1], losses=self.losses)
        self.optimizer.step()


class OneProcess:
    """The whole model on one rank, in ``num_microbatches`` parts whose gradients add up."""

    def __init__(self, workload: Workload, num_microbatches: int) -> None:
        self.workload, self.count = workload, num_microbatches
        self.module = nn.Sequential(*workload.module().layers())
        self.optimizer = workload.optimizer(self.module.parameters())

    def __call__(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        for inputs, target in zip(*(tensor.chunk(self.count) for tensor in self.workload.batch), strict=True):
            (self.workload.loss(self.module(inputs), target) / self.count).backward()
        self.optimizer.step()


class DeepSpeed:
    """DeepSpeed's ``PipelineEngine`` on the same layers, ``partition_method="uniform"``, which cuts in the middle."""

    def __init__(self, workload: Workload, num_microbatches: int) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo", verbose=False)
        ranks, rows = dist.get_world_size(), workload.batch[0].shape[0]
        self.chunks = list(zip(*(tensor.chunk(num_microbatches) for tensor in workload.batch), strict=True))
        pipeline = PipelineModule(
            workload.module().layers(), num_stages=ranks, loss_fn=workload.loss, partition_method="uniform"
        )
        self.module: nn.Module = pipeline
        self.engine, *_ = deepspeed.initialize(
            model=pipeline,
            optimizer=workload.optimizer([p for p in pipeline.parameters() if p.requires_grad]),
            config={
                "train_batch_size": rows,
                "train_micro_batch_size_per_gpu": rows // num_microbatches,
                "gradient_accumulation_steps": num_microbatches,
                "steps_per_print": 10**9,
            },
        )

    def __call__(self) -> None:
        """One step."""
        self.engine.train_batch(data_iter=iter(self.chunks))
