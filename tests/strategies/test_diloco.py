"""``sync=DiLoCo(...)``: against a plain loop over nodes, torchft's published steps, plain training and DDP."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_smddp import DiLoCo
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.diloco import OuterOptimizer
from tests.ranks import run_in_threads, run_trainer_ranks
from tests.strategies.learners import IN_ANOTHER_LAYOUT, RESUMING, AllSteps, Learner, assert_equal, fit, samples, silent
from tests.strategies.resuming import Dropping, Run, Scenario, differences, run
from tests.strategies.test_frozen_parameters import FrozenFirst, UnfreezesAtBatch
from tests.strategies.test_nonfinite import Spoiler
from tests.strategies.test_options import CONFIG, GIVEN, parse
from tests.strategies.test_transparency import Manual

pytestmark = [*RESUMING, IN_ANOTHER_LAYOUT]
NODES = [(0, 2), (1, 3)]
RANKS, EPOCHS, BATCHES, ROWS = 4, 2, 8, 4
CASES = [
    DiLoCo(3),  # an epoch has two rounds and two steps
    DiLoCo(8, momentum=0.5, nesterov=False),  # or one round
    DiLoCo(4, outer_lr=0.9, fragments=2, delay=1, alpha=0.25),
    DiLoCo(7, fragments=2, delay=2),  # it ends while a fragment is under way
]
FRAGMENTS = {1: [["0.weight", "0.bias", "2.weight", "2.bias"]], 2: [["0.weight"], ["0.bias", "2.weight", "2.bias"]]}


def adam(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


def loop(sync: DiLoCo) -> list[dict[str, Tensor]]:
    """Weights behind each epoch: nodes with their own Adam, clipping and schedule; torch's SGD for the outer steps."""
    model, data = Learner(), samples(RANKS * BATCHES * ROWS)
    nodes, fragments = [copy.deepcopy(model) for _ in NODES], FRAGMENTS[sync.fragments]
    shared, own = dict(model.net.named_parameters()), [dict(node.net.named_parameters()) for node in nodes]
    steps = [adam(node) for node in nodes]
    kind = functools.partial(torch.optim.SGD, lr=sync.outer_lr, momentum=sync.momentum, nesterov=sync.nesterov)
    outer = [kind([shared[name] for name in names]) for names in fragments]
    behind, under_way, found = set[int](), set[int](), []

    def send(number: int) -> None:
        under_way.add(number)
        for name in fragments[number]:
            shared[name].grad = shared[name].detach() - torch.stack([of[name].detach() for of in own]).mean(0)

    @torch.no_grad()
    def take_in(number: int, alpha: float) -> None:
        under_way.remove(number)
        outer[number].step()
        for of, name in [(of, name) for of in own for name in fragments[number]]:
            of[name].copy_(alpha * of[name] + (1 - alpha) * shared[name])
        behind.difference_update([number] if alpha == 0 else [])

    for step in range(EPOCHS * BATCHES):
        batch = step % BATCHES
        x, y = data[RANKS * ROWS * batch : RANKS * ROWS * (batch + 1)]
        for node, ranks, (optimizer, schedule) in zip(nodes, NODES, steps, strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                (node.loss([x[rank::RANKS], y[rank::RANKS]]) / len(ranks)).backward()
            nn.utils.clip_grad_norm_(node.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        behind |= set(range(sync.fragments))
        for number in range(sync.fragments):
            due = (number + 1) * sync.every // sync.fragments
            if batch % sync.every + 1 == due - sync.delay:
                send(number)
            if batch % sync.every + 1 == due:
                take_in(number, sync.alpha)
        if batch == BATCHES - 1:
            for number in [*under_way]:
                take_in(number, sync.alpha)
            for number in sorted(behind):
                send(number)
                take_in(number, 0.0)
            found.append(copy.deepcopy(model.net.state_dict()))
    return found


class Scheduled(AllSteps, Learner):
    def configure_optimizers(self) -> Any:
        optimizer, schedule = adam(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(Callback):
    """The weights that validations see; and on this rank those behind the last batch."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer, self.seen = trainer, list[dict[str, Tensor]]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.last = copy.deepcopy(pl_module.state_dict())

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step:  # not the sanity check
            self.seen.append(copy.deepcopy(pl_module.net.state_dict()))


class Normed(Dropping):
    """With statistics, and a number that is another one on each rank."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.net = nn.Sequential(nn.BatchNorm1d(8), self.net)
        self.register_buffer("own", torch.tensor(dist.get_rank() if dist.is_initialized() else 0))


SHORT = Scenario(validate=6, epochs=2, count=64, batch_size=2)
SYNC = DiLoCo(4, fragments=2, delay=1, alpha=0.25, compression="bf16")
MEAN = {"outer_lr": 1.0, "momentum": 0.0}


def saving(directory: str, path: Path | None = None) -> Run:
    callback = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    return run(silent(sync=SYNC), SHORT, ckpt_path=path, callbacks=[callback], make_model=Normed)


def on_two_nodes(directory: str) -> dict[str, Any]:
    """Body of a rank: all that needs nodes."""
    size = (ROWS, RANKS * BATCHES * ROWS)
    found: dict[str, Any] = {"loop": []}
    for sync in CASES:
        watch = Watch()
        fit(silent(sync=sync), Scheduled(*size), max_epochs=EPOCHS, callbacks=[watch], gradient_clip_val=0.5)
        found["loop"].append(watch.seen)
    found["mean"] = fit(silent(sync=DiLoCo(1, **MEAN)), Learner(*size)), fit(silent(), Learner(*size))
    fit(strategy := silent(sync=DiLoCo(2)), Manual(*size))
    found["manual"] = str(strategy._scheme.outer)
    unfreezes = {"callbacks": [UnfreezesAtBatch()], "accumulate_grad_batches": 2}
    found["unfrozen"] = fit(silent(sync=DiLoCo(2, fragments=2)), FrozenFirst(*size), **unfreezes).weights
    watch = Watch()
    module = run(silent(sync=DiLoCo(99)), SHORT, callbacks=[watch], make_model=Normed)
    found["normed"] = watch.last, module.state
    watch.trainer.save_checkpoint(path := f"{directory}.ckpt")
    found["own"] = module.state["net.1.0.weight.exp_avg"]
    found["saved"] = torch.load(path, weights_only=True)["optimizer_states"][0]["state"][2]["exp_avg"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(silent(sync=DiLoCo(2), on_nonfinite="skip"), Spoiler(3, float("nan")))
    found["skipped"] = sum("on_nonfinite" in str(warning.message) for warning in caught)
    unbroken, paths = saving(directory), sorted(Path(directory).glob("*.ckpt"))
    return {**found, "resumed": {path.name: differences(saving(directory, path), unbroken) for path in paths}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[dict[str, Any]]]:
    directory = str(tmp_path_factory.getbasetemp() / "diloco")
    return functools.cache(lambda: run_trainer_ranks(on_two_nodes, RANKS, directory, node_ids="abab", timeout=120))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_nodes_train_as_in_a_plain_loop_and_validation_sees_the_global_model(case: int, ranks: Any) -> None:
    expected = loop(CASES[case])
    for rank in ranks():
        torch.testing.assert_close(rank["loop"][case], expected, rtol=1e-5, atol=1e-6)


def test_steps_of_several_optimizers_left_out_and_unfrozen_and_the_mean_of_every_step(ranks: Any) -> None:
    first = ranks()[0]["unfrozen"]
    assert not torch.equal(first["net.0.weight"], Learner().net[0].weight)
    for rank in ranks():
        assert_equal(*rank["mean"])  # plain DDP
        assert rank["manual"].startswith("8 exchanges")  # of 16 batches
        torch.testing.assert_close(rank["unfrozen"], first, rtol=0, atol=0)
    assert [rank["skipped"] for rank in ranks()] == [0, 1, 0, 0]  # rank 3 has NaN, the first one of its node says it


def test_statistics_and_optimizers_are_averaged_and_runs_from_checkpoints_go_on_to_the_bit(ranks: Any) -> None:
    before, after = zip(*[rank["normed"] for rank in ranks()], strict=True)
    for name in ("net.0.running_mean", "net.0.running_var"):
        torch.testing.assert_close(after[0][name], torch.stack([of_rank[name] for of_rank in before]).mean(0))
        assert all(torch.equal(of_rank[name], after[0][name]) for of_rank in after)
    assert [int(of_rank["own"]) for of_rank in after] == [0, 0, 0, 0]
    mean = torch.stack([rank["own"] for rank in ranks()]).mean(0)
    for rank in ranks():
        torch.testing.assert_close(rank["saved"], mean)  # behind the fit
        assert rank["resumed"] == {"step=10.ckpt": [], "step=15.ckpt": [], "step=5.ckpt": []}


def on_one_node(path: str) -> tuple[list[str], set[str], int]:
    """Body of a rank: plain training, with and without ``sync``; and runs that more nodes have begun."""
    plain = run(silent(), SHORT, make_model=Normed)
    exact = run(silent(sync=DiLoCo(4, fragments=2, **MEAN)), SHORT, make_model=Normed)
    run(silent(), SHORT, ckpt_path=path, make_model=Normed)
    begun = run(strategy := silent(sync=SYNC), SHORT, ckpt_path=path, make_model=Normed)
    saved = torch.load(path, weights_only=True)["smddp_outer_momentum"]
    return differences(exact, plain), set(strategy._scheme.outer.momentum) ^ set(saved), begun.steps[0]


def test_one_node_with_the_mean_alone_is_plain_training_to_the_bit(ranks: Any, tmp_path_factory: Any) -> None:
    assert ranks()
    path = tmp_path_factory.getbasetemp() / "diloco" / "step=10.ckpt"
    for unequal, names, steps in run_trainer_ranks(on_one_node, 2, str(path)):
        assert (unequal, names, steps > 16) == ([], set(), True)


# Of torchft's `diloco_regression_test`: two fragments of one number each before each of 13 steps, by delay and alpha.
PUBLISHED = {
    (0, 0.0): ([1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41],
               [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47]),
    (1, 0.5): ([1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5],
               [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29]),
}  # fmt: skip


def steps_of(group: dist.ProcessGroup, delay: int, alpha: float) -> list[list[float]]:
    """Body of a rank: each step takes 2 away."""
    communicator = Communicator(group, torch.device("cpu"), timedelta(seconds=20))
    module, history = nn.ParameterList([torch.ones(1), torch.ones(1)]), []
    outer = OuterOptimizer(DiLoCo(6, 2.0, 0.0, fragments=2, delay=delay, alpha=alpha), communicator, module)
    outer.begin(0)
    for step in range(13):
        history.append([parameter.item() for parameter in module])
        for parameter in module:
            parameter.data -= 2
        outer.step(step + 1)
    communicator.close()
    return [list(of_fragment) for of_fragment in zip(*history, strict=True)]


@pytest.mark.parametrize(("delay", "alpha"), PUBLISHED)
def test_fragments_follow_torchfts_published_steps(delay: int, alpha: float) -> None:
    assert run_in_threads(steps_of, 1, delay, alpha) == [list(PUBLISHED[delay, alpha])]


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (DiLoCo, {"every": 2.5}, "every=2.5"),
    (DiLoCo, {"every": 4, "fragments": 5}, "give 1 to `every` fragments"),
    (DiLoCo, {"every": 4, "fragments": 2, "delay": 2}, "a delay from 0 to below every / fragments"),
    (DiLoCo, {"every": 4, "alpha": 1.5}, "alpha from 0 to 1"),
    (DiLoCo, {"every": 4, "compression": "powersgd"}, "Give DiLoCo 'bf16', 'fp16' or 'int8'"),
    (silent, {"shard": "optimizer", "sync": SYNC}, "shard='optimizer' cannot be used"),
    (silent, {"compression": "bf16", "sync": SYNC}, "compressed by DiLoCo(compression=...)"),
    (silent, {"uneven": "join", "sync": SYNC}, "uneven='join' cannot be used"),
]


@pytest.mark.parametrize(("make", "options", "text"), REFUSED)
def test_what_does_not_fit_is_refused_with_its_cure(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**options)


@pytest.mark.parametrize("given", ["GIVEN", "{class_path: lightning_smddp.DiLoCo, init_args: GIVEN}"])
def test_cli_reads_it(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr("sys.argv", ["train.py"])
    more = "sync: " + given.replace("GIVEN", "{every: 30, fragments: 2, compression: {method: int8}}")
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(strategy="SMDDPStrategy", communication=GIVEN, more=more))
    sync = parse("--config", str(file))._scheme.sync
    assert (type(sync), sync.every, sync.fragments, sync.wire.method) == (DiLoCo, 30, 2, "int8")
