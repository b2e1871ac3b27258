"""Whether what a step shows for micro-batches makes up what it shows for a batch: some rows and their parts, compared.

What a user may see of a step is compared: logged values, states of metrics, lists and attributes of the module, and
what the step returns. First it is learned what can be: the rules of logged values (``logged_values.py``), and along
which dimension returned tensors are put together (time may be the first one). What differs then has no rule, and is one
process's only where the batch is one micro-batch. A running mean differs only after the first batch: so a step that
leaves something in attributes is compared once more, as if it had been run before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.bridge.attribute_counts import learn_steps
from lightning_smddp.bridge.capture import StepCapture
from lightning_smddp.bridge.logged_values import Rule, is_loss, learn_rules
from lightning_smddp.bridge.step_results import KeptState, Observed
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.loss_weights import path_text
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UncombinableError
from lightning_smddp.wire.pytree import Path, items

Run: TypeAlias = Callable[["Sequence[MicroBatch]", "KeptState | None"], "Observed | None"]
Differences = dict[str, tuple[str, str]]  # by what differs: for the rows at once, and from their parts
RETURNED = "what the step returns"
_MOST = 4
EXACT, MIXED = 5e-5, 1e-1  # relative errors that rounding may explain, in fp32 and with 16-bit types
_NOTHING = 1e-8  # what rounding leaves of what should be zero


@dataclass
class Findings:
    """What trials of a step have shown; it consists of what JSON can say, as it is sent to other ranks.

    Attributes:
        rules: of logged values, by name.
        doubts: names whose values did not tell, see ``logged_values.py``.
        joins: paths in what the step returns, and the dimension along which tensors there are put together; None
            where the value of some rows is that of all rows.
        per_row: attributes of the module, and whether they gain an item or one more for each row.
        differences: what is another for the parts than for the rows at once, whatever the rules.
    """

    rules: dict[str, Any] = field(default_factory=dict)
    doubts: dict[str, Any] = field(default_factory=dict)
    joins: list[tuple[list[Any], int | None]] = field(default_factory=list)
    per_row: list[tuple[list[Any], bool]] = field(default_factory=list)
    differences: Differences = field(default_factory=dict)

    def to_json(self) -> Any:
        """All fields by name, as dicts, lists and strings: a message to the ranks that make no trials."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Findings:
        """The findings of which ``data`` was made by :meth:`to_json`."""
        return cls(**data)

    def after(self, earlier: Findings) -> Findings:
        """These, of a second trial; a name's rule is the ``earlier`` trial's where that left no doubt of it."""
        doubts = {}
        for name in self.doubts.keys() & earlier.doubts.keys():
            both = [rule for rule in earlier.doubts[name] if rule in self.doubts[name]]
            if len(both) > 1:
                doubts[name] = both
        decided = {name: rule for name, rule in earlier.rules.items() if name not in earlier.doubts}
        return replace(self, rules={**self.rules, **decided}, doubts=doubts)

    def beside(self, earlier: Findings) -> Findings:
        """These of a later batch together with ``earlier`` ones; where they contradict each other is a difference.

        A name may have several rules that explain its values. Those that explain both batches are left; if none does,
        the values have no rule.
        """
        found = replace(self, rules=dict(self.rules), doubts=dict(self.doubts), differences=dict(self.differences))
        for name, rule in earlier.rules.items():
            before = now = earlier._possible(name)
            if name in self.rules:
                now = self._possible(name)
            both = [one for one in before if one in now]
            if not both:
                found.differences[f"the logged {name!r}"] = (f"the {now[0]} of parts", f"not their {rule}, as before,")
            found.rules[name] = rule
            if both and rule not in both:
                found.rules[name] = both[0]
            doubted = [*earlier.doubts.get(name, ()), *found.doubts.pop(name, ())]
            doubts = [one for one in both if one in doubted]
            if len(doubts) > 1:
                found.doubts[name] = doubts
        known, new = ({tuple(path): dimension for path, dimension in one.joins} for one in (earlier, self))
        if any(known.get(path, dimension) != dimension for path, dimension in new.items()):
            found.differences[RETURNED] = ("put together in one way", "in another way")
        found.joins = [(list(path), dimension) for path, dimension in {**new, **known}.items()]
        paths = [list(where) for where, _ in earlier.per_row]
        found.per_row = [*earlier.per_row, *(entry for entry in self.per_row if list(entry[0]) not in paths)]
        return found

    def _possible(self, name: str) -> list[Rule]:
        """The rules that explain a name's values, its own first, which doubts leave out where it is that of means."""
        return list(dict.fromkeys([self.rules[name], *self.doubts.get(name, ())]))

    def teach(self, capture: StepCapture, key: Any) -> None:
        """Let ``capture`` combine results of the step ``key`` so."""
        capture.rules |= self.rules
        capture.joins[key] = {tuple(path): dimension for path, dimension in self.joins}
        capture.per_row |= {tuple(where): flag for where, flag in self.per_row}

    def forget_losses(self) -> None:
        """Keep no differences of losses, nor of what the step returned: those are told apart by their weights."""
        kept = {}
        for what, texts in self.differences.items():
            if not is_loss(what) and what != RETURNED:
                kept[what] = texts
        self.differences = kept

    def text(self) -> str:
        """What differs between some rows and their parts, in words, for a warning."""
        texts = [f"{what} is {whole} for some rows, but {made}" for what, (whole, made) in self.differences.items()]
        words = f"{'; '.join(texts[:_MOST])} from their halves"
        if len(texts) > _MOST:
            words += f" ... ({len(texts) - _MOST} more)"
        return words


class PartFailedError(SplitError):
    """A step that was tried on some rows fails on them, on every rank of the pipeline."""


def try_results(
    run: Run,
    share: Callable[[KeptState | None], KeptState | None],
    rows: MicroBatch,
    parts: Sequence[MicroBatch],
    capture: StepCapture,
    key: Any,
    tolerance: float,
    by_rows: bool,
) -> Findings:
    """Compare what a step shows: as things are, and after a batch, where it leaves something that it may go on from.

    Args:
        run: the step on micro-batches for nothing, from a state on; None where its end is on another rank, and where
            it fails in a state in which it may never be.
        share: lets all ranks that run the step have the state that the rank where it ends gives.
        rows: some rows of a batch.
        parts: of them, weighted as losses are.
        capture: that ``run`` combines results with; it is taught what is found.
        key: of the step.
        tolerance: relative error that rounding may explain.
        by_rows: losses are weighted by rows.

    Returns:
        What was found; nothing where ``run`` gives None.
    """
    # The rows at once, twice, and each part alone. What differs between the first two runs is chance.
    whole, again, *alone = [run([some], None) for some in (rows, rows, *parts)]
    findings = Findings()
    if whole is not None:
        results = [part.results for part in alone if part is not None]
        learned = learn_rules(whole.results.logs, [result.logs for result in results], parts, by_rows)
        findings.rules, findings.doubts = dict(learned.rules), dict(learned.doubts)
        findings.joins = _find_joins(whole.results.output, [result.output for result in results])
        set_to = [result.attributes for result in results]
        before = {name: getattr(capture.module, name, None) for name in whole.results.attributes}  # or of its class
        learn_steps(before, whole.results.attributes, set_to, capture.per_row)
        findings.per_row = [(list(where), flag) for where, flag in capture.per_row.items() if _is_plain(where)]
        findings.teach(capture, key)
    by_chance: set[str] = set()
    if whole is not None and again is not None:
        by_chance = set(_differences(whole, again, tolerance))
    # Now the parts as micro-batches, combined by what was learned: this has to give what the rows at once gave.
    findings.differences = _compared(run, None, whole, parts, by_chance, tolerance)
    # And once more with attributes as a step leaves them: a running mean is right only for the first batch. The rank
    # where the step ends knows them; all ranks have to run with them.
    kept = None
    if whole is not None and not findings.differences:
        kept = KeptState.of(whole.results)
    if kept is not None:
        kept = kept.moved(capture.module)
    state = share(kept)
    if state is not None:
        findings.differences = _compared(run, state, run([rows], state), parts, by_chance, tolerance)
    return findings


def _compared(
    run: Run,
    state: KeptState | None,
    whole: Observed | None,
    parts: Sequence[MicroBatch],
    by_chance: set[str],
    tolerance: float,
) -> Differences:
    """What is another for the parts together than for the ``whole``."""
    try:
        made = run(parts, state)
    except UncombinableError as error:  # where the step ends
        return {str(error): ("one value", "none")}
    if whole is None or made is None:
        return {}
    found = _differences(whole, made, tolerance)
    return {what: texts for what, texts in found.items() if what not in by_chance}


def _find_joins(whole: Any, parts: Sequence[Any]) -> list[tuple[list[Any], int | None]]:
    """Dimensions in which the tensors of parts add up to the whole's; None for what is the same for all rows."""
    pieces: list[Mapping[Path, Any]] = [dict(items(part)) for part in parts]
    joins: list[tuple[list[Any], int | None]] = []
    for path, leaf in items(whole):
        if not _is_plain(path):
            continue
        values = [piece.get(path) for piece in pieces]
        dimension = _dimension(_shape(leaf), [_shape(value) for value in values])
        if dimension is not None:
            joins.append((list(path), dimension))
        elif all(_is_constant(leaf, value) for value in values):
            joins.append((list(path), None))
    return joins


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _is_constant(whole: Any, part: Any) -> bool:
    """Whether the value of some rows is that of all: a count would be smaller, but for a count of nothing.

    Floating-point numbers are means where they are alike.
    """
    if isinstance(whole, int) and isinstance(part, int):
        return whole == part != 0
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor):
        return False
    if whole.is_nested or part.is_nested or whole.layout is not torch.strided or part.layout is not torch.strided:
        return False
    if whole.dtype != part.dtype or whole.shape != part.shape:
        return False
    if whole.dim() == 0:
        return not (whole.is_floating_point() or whole.is_complex()) and bool(whole) and torch.equal(whole, part)
    return torch.equal(whole, part)


def _is_plain(path: Path) -> bool:
    """Whether JSON gives it back."""
    return all(isinstance(key, (str, int)) for key in path)


def _dimension(whole: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> int | None:
    if any(len(shape) != len(whole) for shape in parts):
        return None
    for dimension, size in enumerate(whole):
        others = (*whole[:dimension], *whole[dimension + 1 :])
        adds_up = sum(shape[dimension] for shape in parts) == size
        if adds_up and all((*shape[:dimension], *shape[dimension + 1 :]) == others for shape in parts):
            return dimension
    return None


def tolerance_of(is_exact: bool, device: torch.device) -> float:
    """What rounding may explain; convolutions on GPUs round fp32 to TF32 and choose algorithms by the batch's size."""
    if not is_exact:
        return MIXED
    if device.type == "cpu":
        return EXACT
    return 20 * EXACT


# ---- comparing -------------------------------------------------------------------------------------------------------


def _differences(one: Observed, other: Observed, tolerance: float) -> Differences:
    first, second = dict(_shown(one)), dict(_shown(other))
    found = {}
    for what in dict.fromkeys([*first, *second]):
        if what not in first or what not in second:
            found[what] = (_text(first.get(what), "not there"), _text(second.get(what), "not there"))
        elif not _same(first[what], second[what], tolerance):
            texts = _text(first[what]), _text(second[what])
            if texts[0] == texts[1]:
                texts = texts[0], "of other values"
            found[what] = texts
    return found


def _shown(observed: Observed) -> Iterator[tuple[str, Any]]:
    """All that is to be seen of a step: paths, in the user's words, and leaves."""
    results = observed.results
    counts: dict[str, int] = {}
    for log in results.logs:
        counts[log.name] = counts.get(log.name, 0) + 1
        again = ""
        if counts[log.name] > 1:
            again = f" (call {counts[log.name]})"
        if log.metric is None:
            yield f"the logged {log.name!r}{again}", log.value
    roots: list[tuple[str, Any]] = []
    for name, (count, _) in results.metrics.items():
        roots.append((f"the metric {name!r}", count))
    roots += [(f"the metric {name!r}, in its state", state) for name, state in observed.states.items()]
    roots += [(_attribute(where), tail) for where, tail in results.appended]
    roots += [(_attribute((name,)), value) for name, value in results.attributes.items()]
    roots.append((RETURNED, results.output))
    for root, structure in roots:
        for path, leaf in items(structure):
            if root.startswith("self"):
                yield f"{root}{path_text(path)}", leaf
            else:
                yield f"{root} {path_text(path)}".rstrip(), leaf


def _attribute(where: Sequence[Any]) -> str:
    return f"self.{where[0]}{path_text(tuple(where[1:]))}"


def _same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        if one == other or (math.isnan(one) and math.isnan(other)):
            return True
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=_NOTHING)
    if not hasattr(one, "shape") or not hasattr(other, "shape"):
        same = one == other
        if not isinstance(same, bool):  # objects that do not tell
            return True
        return same
    first, second = torch.as_tensor(one), torch.as_tensor(other)
    if first.shape != second.shape or first.is_floating_point() != second.is_floating_point():
        return False
    if first.layout is not torch.strided or first.is_nested or not first.numel():
        return first.layout == second.layout
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    return _close(first.detach(), second.detach(), tolerance)


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Compared with the largest number in the tensor: small ones are differences of large ones."""
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    one, other = one[finite].double(), other[finite].double()
    largest = 0.0
    if one.numel():
        largest = float(one.abs().max())
    return bool(((one - other).abs() <= tolerance * largest + _NOTHING).all())


def _text(value: Any, absent: str = "") -> str:
    if absent and value is None:
        return absent
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if hasattr(value, "shape"):
        return f"of shape {list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value)[:40]
