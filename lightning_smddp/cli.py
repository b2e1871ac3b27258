"""``lightning-smddp``: what can be found out about a machine and a model before training; checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lightning_smddp import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="lightning-smddp", description="Data and pipeline parallelism for Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-smddp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    verify = add("verify", _verify, "compare batches of a LightningModule in a pipeline and in one process, on CPUs")
    _add_module(verify, "module:Class of the LightningModule, with a `train_dataloader` or --datamodule")
    verify.add_argument("--stages", type=int, default=2, help="ranks of the pipeline (default: 2)")
    verify.add_argument("--replicas", type=int, default=1, help="pipelines side by side (default: 1)")
    verify.add_argument("--schedule", default="1f1b", help="name of the schedule (default: 1f1b)")
    verify.add_argument("--num-microbatches", type=_number_or_auto, default="auto", help="a number (default: auto)")
    verify.add_argument("--callback", action="append", default=[], help="module:Class of a callback (several)")

    consolidate = add("consolidate", _convert, "write a checkpoint saved with `sharded=True` as one file")
    consolidate.add_argument("source", metavar="directory", help="the sharded checkpoint")
    consolidate.add_argument("target", metavar="file", help="path or URL of the new file")

    add("doctor", _examine, "show what this machine, or the job that starts it, looks like, and what is wrong")

    plan = add("plan", _plan, "run a batch of a LightningModule, and say which strategies have the memory to train it")
    _add_module(plan, "module:Class of it, or of a function that returns one; or a LightningCLI's file (.yaml, .json)")
    plan.add_argument("--devices", type=int, required=True, help="ranks, on one node")
    plan.add_argument("--memory", type=float, required=True, help="GiB of a rank, beside what a process has anyway")
    plan.add_argument("--config", help="file of a LightningCLI that is made for these classes")
    plan.add_argument("--precision", help="of the Trainer, such as bf16-mixed")

    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


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

    data_class = None if options.datamodule is None else _named(options.datamodule)
    precision = None
    try:
        if options.module.endswith(cli_config.SUFFIXES):
            module, data, precision = cli_config.from_config(options.module, None, data_class)
        elif options.config is not None:
            module, data, precision = cli_config.from_config(options.config, _named(options.module), data_class)
        else:
            module = _named(options.module)(**options.kwargs)
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


def _named(name: str) -> Any:
    """What ``module:Class`` is the name of. Errors in the user's modules are raised as they are."""
    try:
        return resolve_name(name)
    except (AttributeError, ModuleNotFoundError) as error:
        if str(error.name) not in name:
            raise
        cure = "Write module:Class, in a folder where that module can be imported."
        sys.exit(f"lightning-smddp: {name!r}: {error}. {cure}")


def _verify(options: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))
    ranks = options.stages * options.replicas
    print(f"verify: trains in a pipeline of {ranks} processes, then in one process", flush=True)
    from lightning_smddp import PipelineStrategy
    from lightning_smddp.strategies.verify import verify

    try:
        pipeline = PipelineStrategy(
            start_method="spawn",
            pipeline_parallel_size=options.stages,
            schedule=options.schedule,
            num_microbatches=options.num_microbatches,
        )
    except ValueError as error:
        sys.exit(f"lightning-smddp verify: {error}")
    module = _named(options.module)(**options.kwargs)
    data = None if options.datamodule is None else _named(options.datamodule)()
    callbacks = [_named(name)() for name in options.callback]
    return verify(module, data, ranks, pipeline, callbacks)
