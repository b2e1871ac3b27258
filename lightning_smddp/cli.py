"""``lightning-smddp``: what can be found out about a machine and a model before training; checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lightning_smddp import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="lightning-smddp", description="Data and pipeline parallelism for Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-smddp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_verify, _add_conversions, _add_doctor, _add_plan):
        add(commands)
    options = parser.parse_args(arguments)
    command: int = options.run(options)
    return command


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare a pipelined LightningModule with one process that accumulates gradients",
        description="Train a LightningModule for four batches, with its hooks and callbacks, in a pipeline of CPU "
        "processes and in one process that accumulates gradients over the same micro-batches, and compare outputs, "
        "logged values, attributes, weights and buffers step by step. The module needs a `train_dataloader`, or give "
        "--datamodule.",
    )
    _add_module(verify, "module:Class of the LightningModule")
    verify.add_argument("--stages", type=int, default=2, help="ranks of the pipeline (default: 2)")
    verify.add_argument("--replicas", type=int, default=1, help="pipelines side by side (default: 1)")
    verify.add_argument("--schedule", default="1f1b", help="name of the schedule (default: 1f1b)")
    verify.add_argument("--num-microbatches", type=_number_or_auto, default="auto", help="a number (default: auto)")
    verify.add_argument("--callback", action="append", default=[], help="module:Class of a callback (several)")
    verify.set_defaults(run=_verify)


def _add_conversions(commands: Any) -> None:
    consolidate = commands.add_parser(
        "consolidate",
        help="turn a sharded checkpoint into one plain file",
        description="Write a directory that was saved with `sharded=True` as one file, which Lightning loads without "
        "this package.",
    )
    consolidate.add_argument("source", metavar="directory", help="the sharded checkpoint")
    consolidate.add_argument("target", metavar="file", help="path or URL of the new file")
    consolidate.set_defaults(run=_convert)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="show what this machine and this job look like, and what is wrong",
        description="Print the launcher, interfaces, shared memory, backends and versions as this package sees them, "
        "make an all-reduce by each algorithm, and name problems with their cures. Start it as you start "
        "training (`torchrun ... -m lightning_smddp doctor`) to examine all ranks together. The exit code is 1 if "
        "there are errors.",
    )
    doctor.set_defaults(run=_examine)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="say which strategies can train a LightningModule in the memory that there is",
        description="Run one training batch of a LightningModule here, on the CPU, and print for each strategy "
        "whether the module fits, what a rank holds, and the `Trainer(...)` line to write. The exit code is 1 if no "
        "strategy fits.",
    )
    _add_module(
        plan,
        "module:Class of the LightningModule, or of a function that returns one; or a LightningCLI's configuration "
        "file (.yaml, .yml, .json)",
    )
    plan.add_argument("--devices", type=int, required=True, help="ranks, on one node")
    plan.add_argument("--memory", type=float, required=True, help="GiB of a rank, beside what a process has anyway")
    plan.add_argument("--config", help="file of a LightningCLI that is made for these classes")
    plan.add_argument("--precision", help="of the Trainer, such as bf16-mixed")
    plan.set_defaults(run=_plan)


def _add_module(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("module", help=text)
    parser.add_argument("--kwargs", type=json.loads, default={}, help="arguments of the class, as a JSON object")
    parser.add_argument("--datamodule", help="module:Class of a LightningDataModule")


# Commands import what they need when they run: `--help` and `--version` take neither torch nor Lightning.


def _plan(options: argparse.Namespace) -> int:
    # The user's modules are looked for here first, as `python -m` does; a console script looks beside itself.
    sys.path.insert(0, str(Path.cwd()))
    from lightning_smddp.choice import cli_config
    from lightning_smddp.choice.first_batch import UnplannableError
    from lightning_smddp.choice.training_plan import plan

    data_class = None if options.datamodule is None else resolve_name(options.datamodule)
    precision = None
    try:
        if options.module.endswith(cli_config.SUFFIXES):
            module, data, precision = cli_config.from_config(options.module, None, data_class)
        elif options.config is not None:
            module, data, precision = cli_config.from_config(options.config, resolve_name(options.module), data_class)
        else:
            module = resolve_name(options.module)(**options.kwargs)
            data = None if data_class is None else data_class()
        found = plan(module, options.devices, options.memory, data, options.precision or precision)
    except UnplannableError as error:
        print(f"lightning-smddp plan: {error}", file=sys.stderr)
        return 1
    print(found)
    return int(found.best is None)


def _examine(_: argparse.Namespace) -> int:
    from lightning_smddp.doctor.examination import examine

    return examine()


def _convert(options: argparse.Namespace) -> int:
    from lightning_smddp.checkpoint import sharded

    sharded.consolidate(options.source, options.target)
    return 0


def _number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _verify(options: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))
    from lightning_smddp import PipelineStrategy
    from lightning_smddp.strategies.verify import verify

    pipeline = PipelineStrategy(
        start_method="spawn",
        pipeline_parallel_size=options.stages,
        schedule=options.schedule,
        num_microbatches=options.num_microbatches,
    )
    module = resolve_name(options.module)(**options.kwargs)
    data = None if options.datamodule is None else resolve_name(options.datamodule)()
    callbacks = [resolve_name(name)() for name in options.callback]
    return verify(module, data, options.stages * options.replicas, pipeline, callbacks)
