"""Groups of options: the same in all strategies, checked where they are made, shown and read by LightningCLI."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_smddp import (
    CommunicationOptions,
    Compression,
    PartitionOptions,
    PipelineStrategy,
    ReliabilityOptions,
    SMDDPFabricFSDPStrategy,
    SMDDPFabricStrategy,
    SMDDPFSDPStrategy,
    SMDDPStrategy,
)
from lightning_smddp.strategies import pytorch_lightning
from tests.strategies.grouped import GROUPS, grouped

STRATEGIES: dict[str, tuple[type, set[str]]] = {
    "smddp": (SMDDPStrategy, {"communication", "reliability"}),
    "smddp_pipeline": (PipelineStrategy, set(GROUPS)),
    "fabric": (SMDDPFabricStrategy, {"communication", "reliability"}),
    "pytorch_lightning smddp_pipeline": (pytorch_lightning.PipelineStrategy, set(GROUPS)),
}


# ---- a group ----


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CommunicationOptions(collective_timeout=-1), "collective_timeout=-1 has to be positive"),
        (lambda: ReliabilityOptions(init_timeout=0), "init_timeout=0 has to be positive"),
        (lambda: ReliabilityOptions(stop_grace=timedelta(0)), "stop_grace=0.0 has to be positive"),
        (lambda: ReliabilityOptions(stop_grace=None), "stop_grace=None has to be seconds"),  # type: ignore[arg-type]
        (lambda: ReliabilityOptions(on_nonfinite="stop"), "on_nonfinite='stop' is unknown. Valid: 'error'"),  # type: ignore[arg-type]
        (lambda: PartitionOptions(stages_per_rank=0), "stages_per_rank=0 has to be a number from 1, or 'auto'"),
        (lambda: PartitionOptions(placement="near"), "placement='near' is unknown"),
        (lambda: PartitionOptions(memory_limit_gb=0), "memory_limit_gb=0 has to be positive"),
        (lambda: PipelineStrategy(num_microbatches=0), "num_microbatches=0"),
        (lambda: PipelineStrategy(pipeline_parallel_size=-1), "pipeline_parallel_size=-1"),
        (lambda: PipelineStrategy(split=["a"]).options.grid(3), "split=['a'] makes 2 stages, but there are 3"),
        (lambda: PipelineStrategy(split="net.2"), "split='net.2' has to be a list: write split=['net.2']."),
        (lambda: SMDDPFSDPStrategy(wrap="Block"), "wrap='Block' has to be a list"),
        (lambda: PipelineStrategy(activation_checkpointing="on"), "'on' is unknown. Valid: False, True, 'offload'."),  # type: ignore[typeddict-item]
        (lambda: SMDDPFSDPStrategy(activation_checkpointing="on"), "activation_checkpointing='on' is unknown."),  # type: ignore[typeddict-item]
        (lambda: ReliabilityOptions(async_save="false"), "async_save='false' is unknown. Valid: False, True."),  # type: ignore[arg-type]
        (lambda: SMDDPFSDPStrategy(meta_init="no"), "meta_init='no' is unknown"),  # type: ignore[arg-type]
        (lambda: SMDDPStrategy(process_group_backend="smddp"), "process_group_backend='smddp' is of AWS's"),
        (lambda: SMDDPFSDPStrategy(sharding="hybrid", shard_size="2"), "shard_size='2' has to be a number"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_value_is_refused_where_it_is_given(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


# ---- in a strategy ----


@pytest.mark.parametrize("name", STRATEGIES)
def test_groups_are_the_same_in_all_strategies(name: str) -> None:
    kind, groups = STRATEGIES[name]
    given: dict[str, Any] = {
        "communication": CommunicationOptions(collective_timeout=9, verbose=False),
        "reliability": ReliabilityOptions(on_nonfinite="skip", init_timeout=5),
        "partition": PartitionOptions(check=False),
    }
    strategy = kind(**{group: given[group] for group in groups})
    assert strategy._session.options.communication is given["communication"]
    assert strategy._reliability is given["reliability"]
    if "partition" in groups:
        assert strategy.options.partition is given["partition"]
        assert strategy.options.strategy is strategy._session.options
    written = kind(communication={"collective_timeout": 9, "verbose": False})
    assert written._session.options.communication == given["communication"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_no_group_is_refused(name: str) -> None:
    kind, _ = STRATEGIES[name]
    with pytest.raises(TypeError, match=rf"{kind.__name__} has no argument 'verbose'. Write communication="):
        kind(verbose=False)
    with pytest.raises(TypeError, match=r"is not CommunicationOptions\(\.\.\.\), nor a dict"):
        kind(communication="native")
    with pytest.raises(ValueError, match="collective_timeout=0 has to be positive"):
        kind(communication={"collective_timeout": 0})


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_timeout_may_be_seconds(name: str) -> None:
    kind, _ = STRATEGIES[name]
    assert kind(timeout=9)._timeout == kind(timeout=timedelta(seconds=9))._timeout == timedelta(seconds=9)
    with pytest.raises(ValueError, match="timeout=0 has to be positive"):
        kind(timeout=0)


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_option_of_a_group_is_refused(group: str) -> None:
    with pytest.raises(TypeError, match=f"{GROUPS[group].__name__} has no argument 'unknown'. Valid: "):
        PipelineStrategy(**{group: {"unknown": 4}})


def test_fabric_refuses_what_is_the_trainers() -> None:
    with pytest.raises(ValueError, match="async_save=True.* are for the Trainer's strategies"):
        SMDDPFabricStrategy(**grouped(async_save=True))
    with pytest.raises(ValueError, match="resume='auto', .* are for the Trainer's strategies"):
        SMDDPFabricFSDPStrategy(resume="auto")
    with pytest.raises(ValueError, match=r"sync=DiLoCo\(every=2.* is for the Trainer's strategy"):
        SMDDPFabricStrategy(sync={"every": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [PipelineStrategy, SMDDPFSDPStrategy])
def test_by_position_these_take_five(kind: Any) -> None:
    accelerator = object()
    assert kind(accelerator, None, None, None, None)._accelerator is accelerator
    with pytest.raises(TypeError, match=f"{kind.__name__} has no argument 'ddp_comm_state'"):
        kind(None, None, None, None, None, None)


# ---- LightningCLI ----


def parse(*arguments: str, package: str = "lightning.pytorch") -> Any:
    """The strategy that LightningCLI makes of ``arguments``."""
    cli = import_module(f"{package}.cli").LightningCLI
    model = import_module(f"{package}.demos.boring_classes").BoringModel
    made = cli(model, run=False, save_config_callback=None, seed_everything_default=False, args=list(arguments))
    return made.trainer.strategy


def said(capsys: pytest.CaptureFixture[str], *arguments: str, package: str = "lightning.pytorch") -> str:
    """What LightningCLI prints, and ends."""
    with pytest.raises(SystemExit):
        parse(*arguments, package=package)
    printed = capsys.readouterr()
    return printed.out + printed.err


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # it warns of Lightning's use of it
    monkeypatch.setattr("sys.argv", ["train.py"])


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_cli_shows_groups_and_arguments_of_ddp(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    home = f"lightning_smddp.strategies.{package.split('.')[0]}"
    for strategy, absent in (("SMDDPStrategy", "--trainer.strategy.partition"), ("PipelineStrategy", "static_graph")):
        text = said(capsys, "--trainer.strategy.help", f"{home}.{strategy}", package=package)
        shown = set(GROUPS) if strategy == "PipelineStrategy" else {"communication", "reliability"}
        for group in shown:
            for field in fields(GROUPS[group]):
                assert f"--trainer.strategy.{group}.{field.name} " in text
        for name in ("algorithm", "compression", "bucket_cap_mb", "resume", "timeout", "start_method"):
            assert f"--trainer.strategy.{name} " in text
        assert ("--trainer.strategy.find_unused_parameters " in text) == (strategy == "SMDDPStrategy")
        assert absent not in text
        assert "print a table at the" in text  # the docstring of a group


def test_cli_knows_our_names() -> None:
    made = parse("--trainer.strategy=smddp", "--trainer.accelerator=cpu", "--trainer.logger=false")
    assert type(made) is SMDDPStrategy


CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_smddp.{strategy}
    init_args:
      bucket_cap_mb: 3
      timeout: 0:10:00
      communication: {communication}
      reliability: {{on_nonfinite: skip, stop_grace: 20}}
      {more}
"""
GIVEN = "{collective_timeout: 45.5, verbose: false}"
OF_PIPELINE = """partition: {check: false, placement: spread}
      split: [net.2, net.4]
      activation_checkpointing: offload
      schedule: interleaved_1f1b"""


@pytest.mark.parametrize(
    ("strategy", "communication", "more"),
    [
        ("SMDDPStrategy", "GIVEN", "compression: {method: powersgd, rank: 2}\n      static_graph: true"),
        ("PipelineStrategy", "{class_path: lightning_smddp.CommunicationOptions, init_args: GIVEN}", OF_PIPELINE),
    ],
)
def test_cli_reads_groups_and_a_saved_configuration(
    strategy: str, communication: str, more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, saved = tmp_path / "config.yaml", tmp_path / "saved.yaml"
    given.write_text(CONFIG.format(strategy=strategy, communication=communication.replace("GIVEN", GIVEN), more=more))
    saved.write_text(said(capsys, "--config", str(given), "--print_config"))
    for path in (given, saved):
        made = parse("--config", str(path))
        assert made._session.options.bucket_cap_mb == 3
        assert made._session.options.communication == CommunicationOptions(45.5, verbose=False)
        assert made._reliability == ReliabilityOptions(on_nonfinite="skip", stop_grace=20)
        assert made._timeout == timedelta(minutes=10)
        if strategy == "SMDDPStrategy":
            assert made._session.options.compression == Compression("powersgd", rank=2)
            assert made._ddp_kwargs["static_graph"] is True
            assert "gradient_as_bucket_view" not in made._ddp_kwargs  # DDP's default is not ours
        else:
            assert made.options.partition == PartitionOptions(check=False, placement="spread")
            assert made.options.activation_checkpointing == "offload"
            assert (made.options.split, made.options.schedule.name) == (["net.2", "net.4"], "interleaved_1f1b")
