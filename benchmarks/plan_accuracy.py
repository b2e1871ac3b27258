"""What ``lightning-smddp plan`` predicts of a rank's memory, against what is so, for five models.

Each strategy trains each model for some steps in processes of its own. A rank's memory is what its process has that is
no file's, above what it had when it had trained two small layers by the same strategy: so what any training takes
(modules that are imported late, Python's own memory, kernels' buffers) is the column *any model*. Of memory that ranks
share it is its part. It is looked at every 3 ms. Freed memory goes back to the system at once, if it is no small block.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import multiprocessing
import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Record, parser, table
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from plan_models import MODELS, Learner, Small

import lightning_smddp
from lightning_smddp import plan

MIB = 2**20
STEPS = 3  # buckets are made anew, and pipelines checked, in the second
WITHIN = 0.15
TIMEOUT_S = 900.0
STRATEGIES = [
    "smddp",
    "smddp, shard='optimizer'",
    "smddp_fsdp, grad_op",
    "smddp_fsdp, full",
    "smddp_pipeline",
    "smddp_pipeline, checkpointing",
]
PRELOAD = [
    "torch._dynamo",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "lightning_smddp.strategies.lightning",
    "plan_models",
]
_M_MMAP_THRESHOLD = -3  # of malloc.h


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--strategies", nargs="+", default=STRATEGIES, help="as `plan` names them")
    args = options.parse_args()
    if args.quick:
        args.models = ["MLP"]
    record = Record(
        "plan_accuracy",
        f"Predicted and measured memory, {args.ranks} ranks",
        args,
        "the prediction is the measurement.",
    )
    record.data["models"] = {}
    for model in args.models:
        _model(record, args, model)
        record.finish()  # a run that is cut short leaves what it has


def _model(record: Record, args: argparse.Namespace, model: str) -> None:
    (predicted,) = run("predict", 1, model, args.ranks)
    cases = {name: case for name, case in predicted.items() if name in args.strategies}
    for name, case in cases.items():
        ranks = run("measure", args.ranks, model, case["strategy"])
        case["measured"] = max(rank["bytes"] for rank in ranks)
        case["at_end"] = max(rank["end_bytes"] for rank in ranks)
        case["any_model"] = max(rank["any_model_bytes"] for rank in ranks)
        print(model, name, {key: value for key, value in case.items() if key != "parts"}, flush=True)
    record.data["models"][model] = cases
    within = [name for name, case in cases.items() if abs(case["predicted"] / case["measured"] - 1) <= WITHIN]
    record.section(
        model,
        MODELS[model].__doc__ or "",
        _memory(cases),
        f"MiB of the rank with most. {len(within)} of {len(cases)} within {WITHIN:.0%}.",
    )


def _memory(cases: dict[str, Any]) -> str:
    rows = []
    for name, case in cases.items():
        predicted, measured = case["predicted"], case["measured"]
        parts = [part / MIB for part in case["parts"].values()]
        beside = [case["at_end"] / MIB, case["any_model"] / MIB]
        rows.append([name, predicted / MIB, measured / MIB, predicted / measured, *beside, *parts])
    parts = next(iter(cases.values()))["parts"]
    return table(["strategy", "predicted", "measured", "ratio", "at the end", "any model", *parts], rows)


def predict(model: str, ranks: int) -> dict[str, Any]:
    """For each strategy its expression, bytes, and bytes of the parts."""
    _quiet()
    torch.manual_seed(0)
    found = plan(MODELS[model](), ranks, 64.0)
    return {
        estimate.name: {
            "strategy": estimate.strategy,
            "predicted": estimate.memory.total,
            "parts": vars(estimate.memory),
        }
        for estimate in found.estimates
        if estimate.memory is not None
    }


def measure(model: str, strategy: str) -> dict[str, int]:
    """Bytes that training adds on this rank at most."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)  # what is freed is given back
    _quiet()
    torch.manual_seed(0)
    bare = _held()
    _fit(Small(), strategy)
    before = _held()
    watch = _fit(MODELS[model](), strategy)
    return {
        "bytes": watch.most - before,
        "end_bytes": watch.most_at_end - before,
        "any_model_bytes": before - bare,
    }


def _fit(module: Learner, strategy: str) -> Watch:
    chosen = eval(strategy, {name: getattr(lightning_smddp, name) for name in CLASSES})
    watch = Watch()
    trainer = Trainer(
        strategy=chosen,
        devices=dist.get_world_size(),
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],
        callbacks=[watch],
    )
    watch.start()
    try:
        trainer.fit(module)
    finally:
        watch.end()
    return watch


CLASSES = ("SMDDPStrategy", "PipelineStrategy", "SMDDPFSDPStrategy")


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Watch(Callback):
    """Looks at this process's memory all the time.

    Attributes:
        most: bytes, from the start to the last step.
        most_at_end: behind it, where `smddp_fsdp` makes the module whole again.
    """

    def __init__(self) -> None:
        self.most = self.most_at_end = 0
        self._has_trained = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def on_train_end(self, *_: Any) -> None:
        """Look at what comes behind the steps."""
        self._has_trained = True

    def end(self) -> None:
        """Stop."""
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.003):
            if self._has_trained:
                self.most_at_end = max(self.most_at_end, _held())
            else:
                self.most = max(self.most, _held())


def _held() -> int:
    """Bytes of this process that are no file's; of memory that processes share, each page's part."""
    own = _kib("/proc/self/status", "RssAnon:")
    return 1024 * (own + _kib("/proc/self/smaps_rollup", "Pss_Shmem:"))


def _kib(path: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(name))


def run(function: str, ranks: int, *arguments: Any) -> list[Any]:
    """What ``function`` returns in ``ranks`` processes, which are copies of one that has imported all libraries.

    Raises:
        RuntimeError: a rank failed; its traceback is on stderr.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        jobs = [(function, rank, ranks, directory, arguments) for rank in range(ranks)]
        processes = [context.Process(target=_rank, args=job) for job in jobs]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
        failed = [process for process in processes if process.exitcode != 0]
        for process in failed:
            process.kill()
        if failed:
            raise RuntimeError(f"{function}{arguments}: {len(failed)} of {ranks} ranks failed")
        return [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(function: str, rank: int, ranks: int, directory: str, arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    found = globals()[function](*arguments)
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
