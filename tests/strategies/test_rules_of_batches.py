"""What several batches tell of how a logged number comes out of those of its micro-batches."""

from __future__ import annotations

from lightning_smddp.bridge.logged_values import Log, learn_rules
from lightning_smddp.bridge.result_trials import Findings
from lightning_smddp.pipeline.partition.microbatches import MicroBatch

ALIKE = (0.9028369, 0.9012061)  # halves of which several means are the same within rounding
APART = (0.8512, 0.9540)


def log(value: float, name: str) -> Log:
    return Log(name, value, None, None, {})


def found(halves: tuple[float, float], whole: float, name: str = "val_loss") -> Findings:
    parts = [MicroBatch(None, 4, 0.5) for _ in halves]
    learned = learn_rules([log(whole, name)], [[log(half, name)] for half in halves], parts, by_rows=True)
    return Findings(rules=dict(learned.rules), doubts=dict(learned.doubts))


def mean(halves: tuple[float, float]) -> float:
    return sum(halves) / 2


def test_a_batch_with_halves_that_are_alike_does_not_contradict_others() -> None:
    alike, apart = found(ALIKE, mean(ALIKE)), found(APART, mean(APART))
    assert alike.rules == apart.rules == {"val_loss": "loss"}
    assert set(alike.doubts["val_loss"]) == {"mean", "exp", "rms"}
    for both in (apart.beside(alike), alike.beside(apart)):
        assert both.differences == {}
        assert both.rules == {"val_loss": "loss"}
        assert both.doubts == {}


def test_doubts_stay_until_a_batch_tells() -> None:
    alike = found(ALIKE, mean(ALIKE), "error")
    assert alike.beside(alike).doubts == alike.doubts
    rms = (sum(half**2 for half in APART) / 2) ** 0.5
    told = found(APART, rms, "error").beside(alike)
    assert (told.rules, told.doubts, told.differences) == ({"error": "rms"}, {}, {})


def test_batches_that_no_rule_explains_differ() -> None:
    differing = found(APART, max(APART)).beside(found(APART, mean(APART)))
    assert differing.differences == {"the logged 'val_loss'": ("the max of parts", "not their loss, as before,")}
