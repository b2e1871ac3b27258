"""Whether what a step shows for micro-batches makes up what it shows for a batch: some rows and their parts, compared.

What a user may see of a step is compared: logged values, states of metrics, lists and attributes of the module, and
what the step returns. First it is learned what can be: the rules of logged values (``logged_values.py``), and along
which dimension returned tensors are put together (time may be the first one). What differs then has no rule, and is one
process's only where the batch is one micro-batch. A running mean differs only after the first batch: so a step that
leaves something in attributes is compared once more, as if it had been run before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.bridge.attribute_counts import learn_steps
from lightning_smddp.bridge.capture import StepCapture
from lightning_smddp.bridge.logged_values import Rule, is_loss, learn_rules
from lightning_smddp.bridge.step_results import KeptState, Observed, StepResults
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.batch_structure import path_text
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UncombinableError
from lightning_smddp.wire.pytree import Path, items

Run: TypeAlias = Callable[["Sequence[MicroBatch]", "KeptState | None"], "Observed | None"]
Differences: TypeAlias = dict[str, tuple[str, str]]  # by what differs: for the rows at once, and from their parts
Joins: TypeAlias = list[tuple[list[Any], int | None]]  # see ``Findings.joins``
Shape: TypeAlias = tuple[int, ...]
RETURNED = "what the step returns"
_MOST = 4  # differences that a warning names
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
    joins: Joins = field(default_factory=list)
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
        rules = dict(self.rules)
        for name, rule in earlier.rules.items():
            if name not in earlier.doubts:
                rules[name] = rule
        doubts = {}
        for name in self.doubts.keys() & earlier.doubts.keys():
            both = [rule for rule in earlier.doubts[name] if rule in self.doubts[name]]
            if len(both) > 1:
                doubts[name] = both
        return replace(self, rules=rules, doubts=doubts)

    def beside(self, earlier: Findings) -> Findings:
        """These of a later batch together with ``earlier`` ones; where they contradict each other is a difference.

        A name may have several rules that explain its values. Those that explain both batches are left; if none does,
        the values have no rule.
        """
        found = replace(
            self,
            rules=dict(self.rules),
            doubts=dict(self.doubts),
            differences=dict(self.differences),
        )
        for name in earlier.rules:
            found._narrow(name, earlier)
        found._add_joins(earlier)
        paths = [list(where) for where, _ in earlier.per_row]
        found.per_row = list(earlier.per_row)
        for where, flag in self.per_row:
            if list(where) not in paths:
                found.per_row.append((where, flag))
        return found

    def _narrow(self, name: str, earlier: Findings) -> None:
        """Keep the rules of ``name`` that explain its values here and ``earlier``, which has a rule for it."""
        rule = earlier.rules[name]
        # Where nothing was learned of the name here, nothing is held against the earlier rules.
        before = now = earlier._possible(name)
        if name in self.rules:
            now = self._possible(name)
        both = [one for one in before if one in now]
        if both:
            self.rules[name] = both[0]  # the earlier rule, if it is among them
        else:
            self.rules[name] = rule
            texts = (f"the {now[0]} of parts", f"not their {rule}, as before,")
            self.differences[f"the logged {name!r}"] = texts
        doubted = [*earlier.doubts.get(name, ()), *self.doubts.pop(name, ())]
        doubts = [one for one in both if one in doubted]
        if len(doubts) > 1:
            self.doubts[name] = doubts

    def _possible(self, name: str) -> list[Rule]:
        """The rules that explain a name's values, its own first, which doubts leave out where it is that of means."""
        return list(dict.fromkeys([self.rules[name], *self.doubts.get(name, ())]))

    def _add_joins(self, earlier: Findings) -> None:
        """Put tensors together as ``earlier``; a difference where this is done in another way now."""
        known = earlier._join_of_path()
        joins = self._join_of_path()
        for path, dimension in joins.items():
            if known.get(path, dimension) != dimension:
                self.differences[RETURNED] = ("put together in one way", "in another way")
        joins.update(known)
        self.joins = [(list(path), dimension) for path, dimension in joins.items()]

    def _join_of_path(self) -> dict[Path, int | None]:
        return {tuple(path): dimension for path, dimension in self.joins}

    def teach(self, capture: StepCapture, key: Any) -> None:
        """Let ``capture`` combine results of the step ``key`` so."""
        capture.rules |= self.rules
        capture.joins[key] = self._join_of_path()
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
        texts = []
        for what, (whole, made) in self.differences.items():
            texts.append(f"{what} is {whole} for some rows, but {made}")
        listed = "; ".join(texts[:_MOST])
        words = f"{listed} from their halves"
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
    whole = run([rows], None)
    again = run([rows], None)
    alone = [run([part], None) for part in parts]
    findings = Findings()
    by_chance: set[str] = set()
    if whole is not None:
        results = [part.results for part in alone if part is not None]
        findings = _learned(whole.results, results, parts, capture, by_rows)
        findings.teach(capture, key)
        if again is not None:
            by_chance.update(_differences(whole, again, tolerance))
    # Now the parts as micro-batches, combined by what was learned: this has to give what the rows at once gave.
    findings.differences = _compared(run, None, whole, parts, by_chance, tolerance)
    # And once more with attributes as a step leaves them: a running mean is right only for the first batch. The rank
    # where the step ends knows them; all ranks have to run with them.
    kept = None  # where it ends elsewhere, and where something differs anyway
    if whole is not None and not findings.differences:
        kept = KeptState.of(whole.results)
    if kept is not None:
        kept = kept.moved(capture.module)
    state = share(kept)
    if state is not None:
        whole = run([rows], state)
        findings.differences = _compared(run, state, whole, parts, by_chance, tolerance)
    return findings


def _learned(
    whole: StepResults,
    results: Sequence[StepResults],
    parts: Sequence[MicroBatch],
    capture: StepCapture,
    by_rows: bool,
) -> Findings:
    """How what the step shows for some rows comes out of the ``results`` for ``parts`` of them."""
    logs = [result.logs for result in results]
    learned = learn_rules(whole.logs, logs, parts, by_rows)
    findings = Findings(rules=dict(learned.rules), doubts=dict(learned.doubts))
    findings.joins = _find_joins(whole.output, [result.output for result in results])
    before = {name: getattr(capture.module, name, None) for name in whole.attributes}  # or of its class
    set_to = [result.attributes for result in results]
    learn_steps(before, whole.attributes, set_to, capture.per_row)
    for where, flag in capture.per_row.items():
        if _is_plain(where):
            findings.per_row.append((list(where), flag))
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
    for what in by_chance:
        found.pop(what, None)
    return found


def _find_joins(whole: Any, parts: Sequence[Any]) -> Joins:
    """Dimensions in which the tensors of parts add up to the whole's; None for what is the same for all rows."""
    pieces: list[Mapping[Path, Any]] = [dict(items(part)) for part in parts]
    joins: Joins = []
    # rows at once  {"logits": (6, 10), "scale": 3.0}     joins  ["logits"]: 0, the rows
    # their parts   {"logits": (3, 10), "scale": 3.0}            of "scale" nothing: floating-point numbers are means
    for path, leaf in items(whole):
        if not _is_plain(path):
            continue
        values = [piece.get(path) for piece in pieces]
        shapes = [_shape(value) for value in values]
        dimension = _dimension(_shape(leaf), shapes)
        if dimension is not None:
            joins.append((list(path), dimension))
        elif all(_is_constant(leaf, value) for value in values):
            joins.append((list(path), None))
    return joins


def _shape(value: Any) -> Shape:
    return tuple(getattr(value, "shape", ()))


def _is_constant(whole: Any, part: Any) -> bool:
    """Whether the value of some rows is that of all: a count would be smaller, but for a count of nothing.

    Floating-point numbers are means where they are alike.
    """
    if isinstance(whole, int) and isinstance(part, int):
        return whole == part != 0
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor):
        return False
    if not _is_strided(whole) or not _is_strided(part):
        return False
    if whole.dtype != part.dtype or whole.shape != part.shape:
        return False
    if whole.dim() == 0:
        is_mean = whole.is_floating_point() or whole.is_complex()
        if is_mean or not whole:
            return False
    return torch.equal(whole, part)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_plain(path: Path) -> bool:
    """Whether JSON gives it back."""
    return all(isinstance(key, (str, int)) for key in path)


def _dimension(whole: Shape, parts: Sequence[Shape]) -> int | None:
    """The first dimension in which sizes of parts add up to the whole's, all others being the same; None if none."""
    if any(len(shape) != len(whole) for shape in parts):
        return None
    for dimension, size in enumerate(whole):
        total = sum(shape[dimension] for shape in parts)
        others = _without(whole, dimension)
        if total == size and all(_without(shape, dimension) == others for shape in parts):
            return dimension
    return None


def _without(shape: Shape, dimension: int) -> Shape:
    sizes = list(shape)
    del sizes[dimension]
    return tuple(sizes)


def tolerance_of(is_exact: bool, device: torch.device) -> float:
    """What rounding may explain; convolutions on GPUs round fp32 to TF32 and choose algorithms by the batch's size."""
    if not is_exact:
        return MIXED
    if device.type == "cpu":
        return EXACT
    return 20 * EXACT


# ---- comparing -------------------------------------------------------------------------------------------------------


def _differences(one: Observed, other: Observed, tolerance: float) -> Differences:
    first = dict(_shown(one))
    second = dict(_shown(other))
    found: Differences = {}
    for what in dict.fromkeys([*first, *second]):
        if what not in first or what not in second:
            absent = "not there"
            found[what] = (_text(first.get(what), absent), _text(second.get(what), absent))
            continue
        if _same(first[what], second[what], tolerance):
            continue
        of_whole = _text(first[what])
        of_parts = _text(second[what])
        if of_whole == of_parts:  # a shape, or numbers that differ in later digits
            of_parts = "of other values"
        found[what] = (of_whole, of_parts)
    return found


def _shown(observed: Observed) -> Iterator[tuple[str, Any]]:
    """All that is to be seen of a step: paths, in the user's words, and leaves."""
    results = observed.results
    counts: Counter[str] = Counter()
    for log in results.logs:
        counts[log.name] += 1
        again = ""
        if counts[log.name] > 1:
            again = f" (call {counts[log.name]})"
        if log.metric is None:  # else its state is compared
            yield f"the logged {log.name!r}{again}", log.value
    for name, (count, _) in results.metrics.items():
        yield from _leaves_of(f"the metric {name!r}", count)
    for name, state in observed.states.items():
        yield from _leaves_of(f"the metric {name!r}, in its state", state)
    for (attribute, *keys), tail in results.appended:
        yield from _leaves_of(f"self.{attribute}{path_text(tuple(keys))}", tail)
    for attribute, value in results.attributes.items():
        yield from _leaves_of(f"self.{attribute}", value)
    yield from _leaves_of(RETURNED, results.output)


def _leaves_of(root: str, structure: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in items(structure):
        if root.startswith("self"):
            yield f"{root}{path_text(path)}", leaf
        else:
            yield f"{root} {path_text(path)}".rstrip(), leaf


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
    first = torch.as_tensor(one)
    second = torch.as_tensor(other)
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
    one = one[finite].double()
    other = other[finite].double()
    largest = 0.0
    if one.numel():
        largest = float(one.abs().max())
    errors = (one - other).abs()
    return bool((errors <= tolerance * largest + _NOTHING).all())


def _text(value: Any, absent: str = "") -> str:
    """A value in a few words; ``absent``, if given, where it is None."""
    if absent and value is None:
        return absent
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if hasattr(value, "shape"):
        return f"of shape {list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value)[:40]
