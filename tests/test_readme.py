"""What README and docs say is true: snippets run, named options exist, links and quoted messages resolve."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import types
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_smddp
from lightning_smddp import Compression, cli
from lightning_smddp.communication.algorithms import NAMES
from lightning_smddp.communication.compression import METHODS
from lightning_smddp.pipeline.runtime.schedules import SCHEDULES, orders
from lightning_smddp.planner.simulator import Action, simulate
from lightning_smddp.strategies import fsdp
from lightning_smddp.strategies.options import OfPipeline, PipelineOptions
from tests.programs import run_program
from tests.ranks import run_trainer_ranks
from tests.sources import nodes, source_files
from tests.strategies.grouped import GROUPS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
OPTIONS = ROOT / "docs" / "options.md"
GUIDE = ROOT / "docs" / "data_parallel.md"
PIPELINE_GUIDE = ROOT / "docs" / "pipeline.md"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Quoted in the guide, but not ours: Lightning's and gloo's.
OTHERS_MESSAGES = (
    "You selected an invalid",
    "You set strategy",
    "It looks like your",
    "connectFull",
    "Connection closed",
)


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def first_cells(page: Path, heading: str) -> list[list[str]]:
    """The rows, without their header, of the first table below ``heading``."""
    section = page.read_text().split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"^\|.*?(?:\n\n|\Z)", section, re.DOTALL | re.MULTILINE)
    assert rows, heading
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.group().split("\n")[2:] if row]


# ---- snippets ----


def test_the_first_page_and_program_are_short() -> None:
    assert len(README.read_text().splitlines()) <= 120
    assert len(snippets(README, "python")[0].splitlines()) <= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "said"),
    [
        (README, ["2 on cpu", "gradient communication over 32 steps"]),
        (PIPELINE_GUIDE, ["stage 1 on rank 1"]),
    ],
    ids=["data", "pipeline"],
)
def test_the_first_program_trains_on_two_ranks(page: Path, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(snippets(page, "python")[0])
    result = run_program(["train.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert [text for text in said if text not in result.stdout] == []


FRAGMENTS = [text for page in PAGES for text in snippets(page, "python") if ".fit(" not in text]
FITTING = [text for page in PAGES for text in snippets(page, "python") if ".fit(" in text and "__main__" not in text]


@pytest.mark.parametrize("text", FRAGMENTS, ids=lambda text: text.strip().splitlines()[-1][:40])
def test_other_snippets_run(text: str) -> None:
    exec(compile(text, "snippet", "exec"), {})


class _Net(LightningModule):
    """What the pages call ``Net`` and ``model``."""

    def __init__(self) -> None:
        super().__init__()
        widths = [nn.Linear(32, 32) for _ in range(5)]
        self.layers = nn.Sequential(*widths, nn.Linear(32, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return cast(Tensor, self.layers(batch).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 32), batch_size=16)


class _TrainerOnTwoRanks(Trainer):
    """Of the pages' clusters: their arguments are accepted, and two ranks of the CPU do the work."""

    def __init__(self, **options: Any) -> None:
        quiet = {"accelerator": "cpu", "devices": 2, "num_nodes": 1, "max_epochs": 1, "enable_model_summary": False}
        super().__init__(**{**options, **quiet, "enable_progress_bar": False, "logger": False})

    def fit(self, model: Any, *data: Any, ckpt_path: Any = None, **options: Any) -> None:
        """With the checkpoint that the page speaks of."""
        if ckpt_path is not None and not Path(ckpt_path).exists():
            earlier = _TrainerOnTwoRanks(strategy="smddp", enable_checkpointing=False)
            earlier.fit(_Net())
            earlier.save_checkpoint(ckpt_path)
            self.fit_loop.max_epochs = 2
        super().fit(model, *data, ckpt_path=ckpt_path, **options)
        assert self.global_step > 0


def run_snippets(directory: str, texts: list[str]) -> None:
    """Body of a rank."""
    for number, text in enumerate(texts):
        place = Path(directory) / str(number)
        place.mkdir(exist_ok=True)
        os.chdir(place)
        lightning = types.SimpleNamespace(Trainer=_TrainerOnTwoRanks)
        names = {"L": lightning, "Trainer": _TrainerOnTwoRanks, "ModelCheckpoint": ModelCheckpoint, "Net": _Net}
        names |= {"model": _Net(), "data": _Net().train_dataloader()}
        if "trainer = " not in text:
            names["trainer"] = _TrainerOnTwoRanks(strategy="smddp", enable_checkpointing=False)
        try:
            exec(compile(text, "snippet", "exec"), names)
        except Exception as error:
            raise AssertionError(f"this snippet fails:\n{text}") from error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_snippets_that_fit_run_on_two_ranks(tmp_path: Path) -> None:
    assert len(FITTING) > 5
    run_trainer_ranks(run_snippets, 2, str(tmp_path), FITTING, timeout=240)


def test_yaml_names_arguments_that_exist() -> None:
    strategy = yaml.safe_load(snippets(OPTIONS, "yaml")[0])["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_smddp.SMDDPStrategy"
    lightning_smddp.SMDDPStrategy(**strategy["init_args"])


# ---- options ----


def defaults_of(signature: Iterable[inspect.Parameter]) -> dict[str, str]:
    """Of the keyword arguments, as a page writes them."""
    written = {}
    for parameter in signature:
        if parameter.kind is parameter.KEYWORD_ONLY:
            group = is_dataclass(parameter.default)
            text = f"{type(parameter.default).__name__}()" if group else repr(parameter.default)
            written[parameter.name] = text.replace("'", '"')
    return written


def documented(heading: str) -> dict[str, str]:
    rows = first_cells(OPTIONS, heading)
    return {name: row[1].strip("`") for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_options_table_is_the_signature() -> None:
    ours = defaults_of(inspect.signature(lightning_smddp.SMDDPStrategy.__init__).parameters.values())
    assert documented("## Data parallelism") == ours
    of_fabric = defaults_of(inspect.signature(lightning_smddp.SMDDPFabricStrategy.__init__).parameters.values())
    assert of_fabric == ours  # where `resume` and `sync` are refused


def test_pipeline_arguments_are_the_signature() -> None:
    parameters = inspect.signature(lightning_smddp.PipelineStrategy.__init__).parameters.values()
    found = documented("## Pipelines")
    assert list(found) == [*defaults_of(parameters), *OfPipeline.__annotations__]
    own = {name: text for name, text in found.items() if not text.startswith("as of")}
    of_options = {field.name: repr(field.default) for field in fields(PipelineOptions)}
    assert own.items() <= {**of_options, **defaults_of(parameters)}.items()


def test_arguments_of_full_sharding_are_the_signature() -> None:
    parameters = inspect.signature(lightning_smddp.SMDDPFSDPStrategy.__init__).parameters.values()
    found = documented("## Full sharding")
    assert list(found) == [*defaults_of(parameters), *fsdp.FromFSDP.__annotations__]
    own = {name: text for name, text in found.items() if not text.startswith("as of")}
    assert own.items() <= defaults_of(parameters).items()
    of_fabric = defaults_of(inspect.signature(lightning_smddp.SMDDPFabricFSDPStrategy.__init__).parameters.values())
    assert of_fabric == defaults_of(parameters)  # where `resume` is refused


@pytest.mark.parametrize("group", GROUPS.values())
def test_tables_of_groups_are_their_fields(group: type[Any]) -> None:
    expected = {field.name: repr(field.default).replace("'", '"') for field in fields(group)}
    assert documented(f"### {group.__name__.removesuffix('Options')}") == expected


def test_schedules_table_is_what_schedules_say() -> None:
    rows = {row[0].split("`")[1]: row for row in first_cells(PIPELINE_GUIDE, "## Schedules")}
    assert list(rows) == list(SCHEDULES)
    for name, schedule in SCHEDULES.items():
        assert rows[name][3] == (f"`{schedule.substitute}`" if schedule.substitute else "-")
        actions = orders(schedule, 4, 4 * schedule.default_stages_per_rank, 8)
        assert rows[name][5] == f"{100 * simulate(actions).busy_share:.0f} %"
        held = max(most_held(actions[rank]) for rank in actions) / schedule.default_stages_per_rank
        assert rows[name][4] == f"{held:g}"


def most_held(actions: list[Action]) -> int:
    """The most forwards of one rank that wait for the end of their backward."""
    held = most = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def test_algorithms_and_methods_are_all_there() -> None:
    text, guide = OPTIONS.read_text(), GUIDE.read_text()
    for name in (*NAMES, *METHODS):
        assert f"`{name}`" in guide
        assert f'`"{name}"`' in text
    documented = set(re.findall(r"`(\w+)`", guide.split("## Compression")[1].split("\n## ")[0]))
    assert {"block_size", "error_feedback"} <= documented & set(inspect.signature(Compression).parameters)


# ---- links ----


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_named_tests_are_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {link}"
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", page.read_text()))
    assert {name for name in named if not (ROOT / name).exists()} == set()


# ---- messages ----


@functools.cache
def package_strings() -> str:
    """Every string literal of the package, implicit concatenations joined, values in f-strings as dots."""
    found = []
    for path in source_files():
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quoted_messages() -> list[str]:
    headings = ("### At the start", "### While training")
    rows = [row for heading in headings for row in first_cells(GUIDE, heading)]
    quoted = [message for row in rows for message in re.findall(r"``(.+?)``|`([^`]+)`", row[0])]
    return [double or single for double, single in quoted]


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_messages_exist(message: str) -> None:
    if any(part in message for part in OTHERS_MESSAGES) or message == "note":
        return
    message = re.sub(r"^Rank(Failed|Timeout)Error: rank ", "", message)
    strings = package_strings()
    parts = [part.strip(" ():=,.;") for part in re.split(r"\.\.\.|='\w+'", message)]
    for part in filter(None, parts):
        assert part in strings, part


def test_files_that_the_design_names_exist() -> None:
    """By their paths in the package, or within the pipeline's rooms."""
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text()))
    assert len(named) > 20
    roots = (ROOT, ROOT / "lightning_smddp", ROOT / "lightning_smddp" / "pipeline")
    assert {name for name in named if not any((root / name).exists() for root in roots)} == set()


def test_names_that_contributing_gives_exist() -> None:
    """Of functions, classes and options: one that was renamed sends a newcomer nowhere."""
    files = [*source_files(), *(ROOT / "tests").rglob("*.py"), ROOT / "pyproject.toml"]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in files)))
    named = set(re.findall(r"`(?:\w+\.)?(\w+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(named) > 40
    assert named - words == set()


def test_no_snippet_is_left_out() -> None:
    programs = [snippets(README, "python")[0], snippets(PIPELINE_GUIDE, "python")[0]]
    everything = [text for page in PAGES for text in snippets(page, "python")]
    left = [text for text in everything if text not in FRAGMENTS + FITTING + programs]
    assert left == []


# ---- the site, which `make docs` builds ----


def test_each_page_is_in_a_list_of_the_site() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    entries = re.findall(r"^(?:.* <)?([\w./]+)>?$", "".join(re.findall(r"hidden:\n(.*?)```", index, re.DOTALL)), re.M)
    listed = {(ROOT / "docs" / f"{entry}.md").resolve() for entry in entries}
    assert set(PAGES) - listed == {ROOT / "docs" / "index.md"}
    assert {page for page in listed if not page.exists()} == set()


def test_the_reference_has_every_public_name_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)) == lightning_smddp.__all__
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    (commands,) = re.findall(r"\{([\w,]+)\}\s", capsys.readouterr().out)[:1]
    assert set(re.findall(r"command-help\} (.*)", text)[0].split()) == set(commands.split(","))


def test_words_that_the_quick_start_gives_are_strategies() -> None:
    words = set(re.findall(r'"(smddp\w*)"', (ROOT / "docs" / "quickstart.md").read_text()))
    assert len(words) > 5
    assert words - set(StrategyRegistry.available_strategies()) == set()
