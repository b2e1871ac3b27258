"""What watching costs a step: supervision and the look for NaN, on and off in turns within one run."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import CommunicationOptions, PipelineStrategy, SMDDPStrategy

STEP_S = 0.05
BLOCK = 10
WIDTH = 700  # 2 MB a layer
STRATEGIES = {"smddp": SMDDPStrategy, "smddp_pipeline": PipelineStrategy}


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Turns(Callback):
    """Switches watching on and off, and takes the time of what a step needs beyond its 50 ms, which it sleeps."""

    def __init__(self) -> None:
        self.samples: dict[bool, list[float]] = {True: [], False: []}
        self.cpu: dict[bool, list[float]] = {True: [], False: []}
        self.thread_share = 0.0
        self._supervisor: Any = None
        self._start = (0.0, 0.0)
        self._thread_start = (0.0, 0.0)

    def _is_on(self, step: int) -> bool:
        return step // BLOCK % 2 == 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._supervisor = trainer.strategy._supervision.supervisor
        self._thread_start = (time.monotonic(), _supervisors_cpu())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        _switch(trainer.strategy, self._supervisor if self._is_on(batch_idx) else None)
        time.sleep(STEP_S)
        self._start = (time.perf_counter(), time.thread_time())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 2 * BLOCK and batch_idx % BLOCK > 0:
            on = self._is_on(batch_idx)
            self.samples[on].append(time.perf_counter() - self._start[0])
            self.cpu[on].append(time.thread_time() - self._start[1])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        start, cpu = self._thread_start
        self.thread_share = (_supervisors_cpu() - cpu) / (time.monotonic() - start)
        _switch(trainer.strategy, self._supervisor)


def _supervisors_cpu() -> float:
    """Seconds of the two threads that watch."""
    threads = [thread for thread in threading.enumerate() if thread.name in ("smddp-supervisor", "smddp-guard")]
    assert len(threads) == 2
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads if thread.ident)


def _switch(strategy: Any, supervisor: Any) -> None:
    strategy._supervision.supervisor = supervisor
    mode = "error" if supervisor is not None else "ignore"
    strategy._reliability = replace(strategy._reliability, on_nonfinite=mode)
    if getattr(strategy, "_scheme", None) is not None and strategy._scheme.synchronizers:
        strategy._scheme.synchronizers[-1].watches = supervisor is not None
    if getattr(strategy, "_pipelined", None) is not None:
        strategy._pipelined.watching = supervisor is not None


def rank_main(strategy: str, steps: int) -> dict[str, Any]:
    """Medians of wall and CPU milliseconds with and without, and the share of a CPU that the watching thread took."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    turns, communication = Turns(), CommunicationOptions(verbose=False)
    trainer = Trainer(
        strategy=STRATEGIES[strategy](communication=communication), accelerator="cpu", devices=2,
        max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[turns],
    )  # fmt: skip
    data = TensorDataset(torch.randn(16, WIDTH))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
    replicas = 1 if strategy == "smddp_pipeline" else 2
    trainer.fit(model, DataLoader(TensorDataset(data.tensors[0].repeat(steps * replicas, 1)), batch_size=16))

    def medians(values: dict[bool, list[float]]) -> dict[str, float]:
        return {name: 1e3 * statistics.median(values[on]) for name, on in (("on", True), ("off", False))}

    return {
        "wall_ms": medians(turns.samples), "cpu_ms": medians(turns.cpu), "thread_share": turns.thread_share,
        "samples": {str(on): theirs for on, theirs in turns.samples.items()},
    }  # fmt: skip


def call_costs(repeats: int = 200_000) -> dict[str, float]:
    """Microseconds of what the training thread does for the supervisor in a step, alone."""
    from torch.distributed import HashStore

    from lightning_smddp.supervision.supervisor import Supervisor

    supervisor = Supervisor(HashStore(), 0, 1, 60.0, 60.0)

    def notes(step: int) -> None:
        supervisor.begin_batch(step, step)
        for phase in ("forward", "backward", "optimizer", "data"):
            supervisor.begin(phase)

    costs = {}
    for name, call in (("gate", supervisor.gate), ("progress of a step", notes)):
        start = time.perf_counter()
        for step in range(repeats):
            call(step)
        costs[name] = 1e6 * (time.perf_counter() - start) / repeats
    supervisor.close()
    return costs
