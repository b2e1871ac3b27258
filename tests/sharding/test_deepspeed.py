"""``strategy="smddp_deepspeed"``: the numbers of one process, and its checkpoints.

DeepSpeed's import takes seconds: one start of ranks trains what the tests look at.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp import SMDDPDeepSpeedStrategy
from lightning_smddp.communication.nonfinite import NonFiniteGradientError
from lightning_smddp.deepspeed import start
from lightning_smddp.strategies.checks import require_elementwise, require_supported_by_deepspeed
from tests.ranks import run_trainer_ranks
from tests.sharding.learners import AdamLearner
from tests.strategies.learners import AllSteps, Learner, make_trainer, silent

RANKS, BATCH = 2, 4  # of `Learner`


class Logging(AdamLearner):
    """Three batches an epoch, so that accumulation ends with a single one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


class SgdLearner(Logging):
    """Gradients that are too small show in the weights, as they do not with Adam."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Evaluating(AllSteps, Logging):
    pass


class Configured(Evaluating):
    """Its layers are made where stage 3 cuts them at once."""

    def build(self, batch_size: int, count: int) -> None:
        super().build(batch_size, count)
        self.net = nn.Sequential()

    def configure_model(self) -> None:
        if not len(self.net):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


class Tied(Logging):
    """A weight with two names, a frozen layer, a buffer, and a parameter whose number of elements is odd."""

    def build(self, batch_size: int, count: int) -> None:
        super().build(batch_size, count)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("count_of_batches", torch.zeros(()))
        self.register_buffer("whose", torch.zeros(()))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def on_fit_start(self) -> None:
        self.whose.fill_(self.global_rank)

    def loss(self, batch: Any) -> Any:
        self.count_of_batches += 1
        # Buffers are the first rank's before each step.
        self.log(f"whose in step {self.global_step}", self.whose.clone(), sync_dist=True)
        self.whose.fill_(self.global_rank)
        x = self.second(self.first(self.frozen(batch[0]))) * self.scale
        return F.cross_entropy(self.net(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Writing(Logging):
    """Clips its weights in a hook, with and without autograd's knowledge."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)
        self.net[2].weight.data.clamp_(-0.1, 0.1)


class BadBatch(Logging):
    """The loss of one batch of the second rank is NaN."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        if len(self.losses) == self.bad and self.trainer.global_rank == 1:
            loss = loss * float("nan")
        return loss


# Learner, the Trainer's options, relative tolerance.
CASES: dict[str, tuple[type[Logging], dict[str, Any], float]] = {
    "accumulation": (SgdLearner, {"accumulate_grad_batches": 2}, 1e-5),
    "evaluation": (Evaluating, {}, 1e-5),
    "evaluation, configure_model": (Configured, {}, 1e-5),
    "offload": (Logging, {}, 1e-5),
    "tied, clipping": (Tied, {"gradient_clip_val": 0.1}, 1e-5),
    "16-bit": (SgdLearner, {"precision": "bf16-mixed"}, 3e-2),
    "hooks that write": (Writing, {}, 1e-5),
}


# Stages 1 and 2 are one optimizer of DeepSpeed's, to which most cases look the same.
OFTEN = {
    1: ["tied, clipping"],
    2: ["accumulation", "evaluation", "offload", "16-bit", "hooks that write"],
    3: ["accumulation", "evaluation, configure_model", "tied, clipping"],
}


def train(strategy: Any, case: str, batch_size: int, folder: Path) -> dict[str, Any]:
    """What a training leaves in its checkpoint, what it logged, and what the model then gives."""
    make, options, _ = CASES[case]
    model = make(batch_size)
    trainer = make_trainer(strategy, **options)
    if case == "tied, clipping":  # a run before this one, in which no buffers are sent
        trainer.predict(model, model.train_dataloader())
    trainer.fit(model)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    path = str(folder / f"{case}.ckpt")
    trainer.save_checkpoint(path)
    saved = parts_of(path)
    if case.startswith("evaluation"):
        metrics["tested"] = trainer.test(model, verbose=False)[0]["test_loss"]
        (metrics["again"],) = trainer.validate(model, ckpt_path=path, verbose=False)[0].values()
        metrics["predicted"] = len(trainer.predict(model))
    return {"saved": saved, "metrics": metrics}


def fit(strategy: Any, epochs: int, path: str | None = None) -> Any:
    trainer = make_trainer(strategy, max_epochs=epochs)
    trainer.fit(Logging(), ckpt_path=path)
    return trainer


def go_on(stage: int, folder: Path) -> dict[str, Any]:
    """The checkpoints of two epochs: at once, and with another strategy for each."""
    other = stage % 3 + 1
    smddps, own = str(folder / "smddp 1.ckpt"), str(folder / "it 1.ckpt")
    fit(silent(), 1).save_checkpoint(smddps)
    fit(SMDDPDeepSpeedStrategy(stage=stage), 1).save_checkpoint(own)
    ways = {
        "smddp to it": (smddps, SMDDPDeepSpeedStrategy(stage=stage)),
        "it to smddp": (own, silent()),
        "it to another stage": (own, SMDDPDeepSpeedStrategy(stage=other)),
    }
    found = {}
    for way, (half, strategy) in ways.items():
        whole = str(folder / f"{way} 2.ckpt")
        fit(strategy, 2, half).save_checkpoint(whole)
        found[way] = parts_of(whole)
    return found


def at_once(folder: Path) -> dict[str, Any]:
    """The checkpoint of two epochs of data parallelism."""
    path = str(folder / "at once.ckpt")
    fit(silent(), 2).save_checkpoint(path)
    return parts_of(path)


def parts_of(path: str) -> dict[str, Any]:
    """What is compared of a checkpoint."""
    loaded = torch.load(path, weights_only=True)
    return {key: loaded[key] for key in ("state_dict", "optimizer_states", "global_step", "lr_schedulers")}


def meet_nan(stage: int) -> tuple[list[str], list[str], int]:
    """The errors, where the bad batch is alone and the first of two; what ``skip`` warns of, how many it left out."""
    errors = []
    for bad, accumulated in ((2, 1), (0, 2)):
        trainer = make_trainer(SMDDPDeepSpeedStrategy(stage=stage), accumulate_grad_batches=accumulated)
        with pytest.raises(NonFiniteGradientError) as caught:
            trainer.fit(BadBatch(bad))
        errors.append(str(caught.value))
    strategy = SMDDPDeepSpeedStrategy(stage=stage, reliability={"on_nonfinite": "skip"})
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("always", message="Gradients are not finite")
        make_trainer(strategy).fit(BadBatch(2))
    texts = [str(warning.message) for warning in warned]
    return errors, [text for text in texts if "finite" in text], strategy._guard.skipped


def write() -> str:
    """The error in stage 3, where DeepSpeed does not see what a hook writes."""
    with pytest.raises(ValueError, match="since the last step") as caught:
        make_trainer(SMDDPDeepSpeedStrategy(stage=3)).fit(Writing())
    return str(caught.value)


def train_all(directory: str) -> dict[int, dict[str, Any]]:
    """The cases of each stage, and everything else that is looked at of stages 2 and 3."""
    found: dict[int, dict[str, Any]] = {}
    whole = at_once(Path(directory))
    for stage, names in OFTEN.items():
        folder = Path(directory, str(stage))
        found[stage] = {}
        for case in names:
            strategy = SMDDPDeepSpeedStrategy(stage=stage, offload_optimizer=case == "offload")
            found[stage][case] = train(strategy, case, BATCH, folder)
        if stage > 1:
            found[stage] |= {"at once": whole, "going on": go_on(stage, folder), "nan": meet_nan(stage)}
    found[3]["writing"] = write()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, Any]]]:
    """Of each rank."""
    return run_trainer_ranks(train_all, RANKS, str(tmp_path_factory.mktemp("ranks")), timeout=280.0)


class TestOnRanks:
    pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

    @pytest.mark.parametrize("case", CASES)
    def test_the_numbers_of_one_process(self, results, tmp_path, case):
        """In each stage that has trained this case."""
        tolerance = CASES[case][2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = train("auto", case, RANKS * BATCH, tmp_path)
        found = [of_stage[case] for result in results for of_stage in result.values() if case in of_stage]
        assert found
        for actual in found:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 10)

    @pytest.mark.parametrize("stage", [2, 3])
    def test_checkpoints_go_to_and_from_other_strategies(self, results, stage):
        others = results[0][stage]["going on"]
        assert len(others) == 3
        for actual in others.values():
            torch.testing.assert_close(actual, results[0][stage]["at once"], rtol=1e-5, atol=1e-6)

    def test_what_a_hook_writes_where_deepspeed_does_not_see_it_is_an_error(self, results):
        for result in results:
            error = result[3]["writing"]
            assert error.startswith("net.0.weight: written to since the last step")
            assert "safe_set_full_fp32_param" in error

    @pytest.mark.parametrize("stage", [2, 3])
    def test_a_step_that_deepspeed_leaves_out_is_named(self, results, stage):
        for rank, result in enumerate(results):
            (alone, accumulated), warned, skipped = result[stage]["nan"]
            assert "not finite in step 2 (epoch 0, batch 2): on rank 1" in alone
            assert "not finite in step 0 (epoch 0, batch 1): on rank 1" in accumulated
            assert "the loss (nan)" in alone
            assert "the loss (nan)" in accumulated
            assert skipped == 1
            assert len(warned) == (rank == 0)


# ---- what is refused ----


class ByHand(Learner):
    automatic_optimization = False


class Scaled(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ByHand(), {}, "ByHand has automatic_optimization=False"),
        (Learner(), {"callbacks": [WeightAveraging()]}, "WeightAveraging averages or replaces whole parameters"),
        (Scaled(), {}, r"'scale' of Scaled has no dimension.*torch.tensor\(\[0.5\]\)"),
    ],
)
def test_modules_that_ask_for_what_would_not_happen_are_refused(module, options, message):
    trainer = make_trainer("auto", **options)
    with pytest.raises(ValueError, match=message):
        require_supported_by_deepspeed(module, trainer.callbacks)


def test_an_optimizer_that_looks_at_whole_parameters_is_refused():
    weights = torch.nn.Linear(3, 3).parameters()
    with pytest.raises(ValueError, match=r"Adafactor cannot be used .* each element .*shard='optimizer'"):
        require_elementwise(torch.optim.Adafactor(weights))
    require_elementwise(torch.optim.AdamW(torch.nn.Linear(3, 3).parameters()))


# ---- in one process ----


def test_a_strategy_can_be_copied_and_sent():
    strategy = SMDDPDeepSpeedStrategy(stage=1)
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other.config == strategy.config
    config = {"zero_optimization": {"stage": 2}}
    SMDDPDeepSpeedStrategy(config=config).config["gradient_clipping"] = 1.0
    assert config == {"zero_optimization": {"stage": 2}}  # the user's stays as it is


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"Run: pip install 'lightning-smddp\[deepspeed\]'"):
        SMDDPDeepSpeedStrategy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 0}, r"stage is 0. Valid: 1 .* To shard nothing, use strategy='smddp'"),
        ({"config": {"train_batch_size": 8}}, r"config={'zero_optimization': {'stage': ...}} is 0. Valid: 1"),
        ({"reliability": {"sharded": True}}, "sharded=True cannot be used .* use strategy='smddp_fsdp'"),
    ],
)
def test_what_shards_nothing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SMDDPDeepSpeedStrategy(**arguments)


def test_a_loader_of_ready_batches_needs_no_batch_size():
    source = SimpleNamespace(is_defined=lambda: True, dataloader=lambda: DataLoader([1], batch_size=None))
    strategy = SMDDPDeepSpeedStrategy()
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(fit_loop=SimpleNamespace(_data_source=source)))
    assert strategy._auto_select_batch_size() == 1


def sizes_on_cpu(**arguments: Any) -> tuple[int, int]:
    """Of the buckets of gradients and of parameters, which is given."""
    strategy = SMDDPDeepSpeedStrategy(**arguments)
    strategy.accelerator, strategy.parallel_devices = CPUAccelerator(), [torch.device("cpu")]
    strategy.cluster_environment = LightningEnvironment()
    strategy._format_config()
    zero = strategy.config["zero_optimization"]
    return zero["reduce_bucket_size"], zero["allgather_bucket_size"]


def test_buckets_on_cpus_are_small_unless_their_size_is_given(tmp_path, monkeypatch):
    ours, given = 2**22, 2**20
    assert sizes_on_cpu(stage=3) == (ours, ours)
    assert sizes_on_cpu(stage=3, allgather_bucket_size=given) == (ours, given)
    config = {"zero_optimization": {"stage": 2, "allgather_bucket_size": given}}
    assert sizes_on_cpu(config=config) == (ours, given)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    assert sizes_on_cpu() == (ours, given)
