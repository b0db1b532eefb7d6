"""What the demo's numbers say: the verdict, the headline sentences, pruned against unpruned.

The HTML report and the terminal's table both read these, so they cannot tell different stories.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_port.drawing.text import NONE, change, error, finite, fixed, percent, points, ratio, size


@dataclass(frozen=True)
class Headline:
    """One card: a title, the one thing to see, the sentence that says it, and its bars."""

    title: str
    figure: str
    sentence: str
    style: str = ""
    bars: tuple[tuple[str, float | None, str, str], ...] = ()  # (name, value, text, class)


@dataclass(frozen=True)
class Row:
    """One line of the comparison, as text."""

    name: str
    pruned: str
    full: str
    relation: str = ""
    brief: bool = False  # also on the terminal


def look(metrics: Any, *keys: str) -> Any:
    """The entry under a path of keys, or None where any part of the path is missing.

    >>> look({"runs": {"pruned": {"steps": 3}}}, "runs", "pruned", "steps")
    3
    >>> look({"runs": None}, "runs", "pruned") is None
    True
    """
    for key in keys:
        if not isinstance(metrics, Mapping):
            return None
        metrics = metrics.get(key)
    return metrics


def passed(check: Mapping[str, Any]) -> bool:
    """Whether a parity check passed: flagged so, and without a NaN or ∞ as its worst error.

    A NaN compares false with every tolerance, so a flag computed as `not worst > tolerance` is
    true for it: the error itself decides.
    """
    worst = check.get("worst")
    return check.get("passed") is True and (worst is None or finite(worst) is not None)


def strain(check: Mapping[str, Any]) -> float:
    """worst / tolerance of a check: above 1 it failed; ∞ where the error is not finite."""
    worst, tolerance = finite(check.get("worst")), finite(check.get("tolerance"))
    if worst is None:
        return 0.0 if check.get("worst") is None else math.inf
    if not tolerance:
        return math.inf if worst else 0.0
    return worst / tolerance


def verdict(metrics: Mapping[str, Any]) -> tuple[str, str]:
    """Whether port and specification agree.

    YES needs the demo's own verdict, at least one check, and no failed one. A failed check is a NO
    whatever the demo's verdict was.

    Args:
        metrics: the content of metrics.json.

    Returns:
        ("YES" | "NO" | "NOT CHECKED", one sentence that says why).
    """
    parity = look(metrics, "parity")
    checks = look(parity, "checks") or []
    agrees = look(parity, "agrees")
    if look(parity, "ran") is not True:
        why = look(parity, "why_not") or "the reason was not recorded"
        return "NOT CHECKED", f"The port was not compared with the specification: {why}."
    failed = [check for check in checks if not passed(check)]
    worst: Mapping[str, Any] = max(failed or checks, key=strain, default={})
    found = error(worst.get("worst")).replace(NONE, "not finite")
    at = f"“{worst.get('name')}” (error {found}, {error(worst.get('tolerance'))} allowed)"
    if failed:
        sentence = (
            f"The port and the specification disagree: {len(failed)} of {len(checks)} checks "
            f"failed, the worst of them {at}."
        )
        return "NO", sentence
    if agrees is False:
        return "NO", "The port and the specification disagree, outside the listed checks."
    if agrees is not True or not checks:
        return "NOT CHECKED", "The comparison with the specification ran but gave no verdict."
    sentence = (
        f"The port and the specification agree: {_all(len(checks))} within tolerance, "
        f"the closest call being {at}."
    )
    return "YES", sentence


def _all(number: int) -> str:
    return "the one check is" if number == 1 else f"all {number} checks are"


def headlines(metrics: Mapping[str, Any]) -> list[Headline]:
    """The four things to know: agreement, τ, memory, coverage, each in one sentence.

    Args:
        metrics: the content of metrics.json.

    Returns:
        Four headlines, in this order.
    """
    word, sentence = verdict(metrics)
    style = {"YES": "good", "NO": "bad"}.get(word, "open")
    first = Headline("Port and spec agree?", word, sentence, style)
    return [first, _tau_headline(metrics), _memory_headline(metrics), _coverage_headline(metrics)]


def _tau(metrics: Mapping[str, Any], run: str, state: str) -> Any:
    return look(metrics, "runs", run, "heldout", state, "tau")


def _tau_headline(metrics: Mapping[str, Any]) -> Headline:
    before, after = _tau(metrics, "pruned", "untrained"), _tau(metrics, "pruned", "trained")
    full_before, full_after = _tau(metrics, "full", "untrained"), _tau(metrics, "full", "trained")
    sentence = (
        f"On held-out modules training moves τ, the tokens per target pass, from {fixed(before)} "
        f"to {fixed(after)} for the pruned draft and from {fixed(full_before)} to "
        f"{fixed(full_after)} for the unpruned one."
    )
    if all(finite(value) is None for value in (before, after, full_before, full_after)):
        sentence = "τ on held-out modules was not measured."
    bars = (
        ("untrained", finite(before), fixed(before), "untrained"),
        ("pruned", finite(after), fixed(after), "pruned"),
        ("unpruned", finite(full_after), fixed(full_after), "full"),
    )
    figure = f"{fixed(before)} → {fixed(after)}"
    return Headline("τ, pruned draft", figure, sentence, "pruned", bars)


def _memory_headline(metrics: Mapping[str, Any]) -> Headline:
    pruned = look(metrics, "runs", "pruned", "peak_bytes")
    full = look(metrics, "runs", "full", "peak_bytes")
    sentence = (
        f"Forward and backward of a step peak at {size(pruned)} with the pruned vocabulary and at "
        f"{size(full)} without pruning: {ratio(pruned, full)} as much."
    )
    if ratio(pruned, full) == NONE:
        sentence = "The peak memory of the two training steps was not measured."
    bars = (
        ("pruned", finite(pruned), size(pruned), "pruned"),
        ("unpruned", finite(full), size(full), "full"),
    )
    title = "Peak step memory"
    return Headline(title, ratio(pruned, full), sentence, "pruned", bars)


def _coverage_headline(metrics: Mapping[str, Any]) -> Headline:
    vocabulary = look(metrics, "vocabulary")
    train, heldout = look(vocabulary, "coverage_train"), look(vocabulary, "coverage_heldout")
    sentence = (
        f"The {fixed(look(vocabulary, 'size'), 0)} kept ids of {fixed(look(vocabulary, 'of'), 0)} "
        f"cover {percent(train)} of the answers' tokens in training and {percent(heldout)} on "
        "held-out modules."
    )
    if finite(train) is None and finite(heldout) is None:
        sentence = "The coverage of the draft vocabulary was not measured."
    bars = (
        ("training", finite(train), percent(train), "coverage"),
        ("held-out", finite(heldout), percent(heldout), "coverage"),
    )
    return Headline("Held-out coverage", percent(heldout), sentence, "coverage", bars)


def comparison(metrics: Mapping[str, Any]) -> list[Row]:
    """Pruned against unpruned, line by line.

    Args:
        metrics: the content of metrics.json.

    Returns:
        The rows; those marked `brief` make the terminal's table.
    """
    pruned, full = look(metrics, "runs", "pruned"), look(metrics, "runs", "full")

    def own(name: str, key: str, show: Any = fixed, *more: int, brief: bool = False) -> Row:
        a, b = look(pruned, key), look(full, key)
        return Row(name, show(a, *more), show(b, *more), ratio(a, b), brief)

    def held(name: str, state: str, key: str, show: Any = fixed, brief: bool = False) -> Row:
        a, b = (look(run, "heldout", state, key) for run in (pruned, full))
        relation = change(a, b) if show is fixed else points(a, b)
        return Row(name, show(a), show(b), relation, brief)

    def gain(run: str) -> str:
        return change(_tau(metrics, run, "trained"), _tau(metrics, run, "untrained"))

    def loss(run: str) -> str:
        return fixed(look(metrics, "runs", run, "heldout", "trained", "loss"))

    return [
        own("draft vocabulary", "draft_vocab_size", fixed, 0, brief=True),
        own("trainable parameters", "parameters", fixed, 0),
        own("peak memory of a step", "peak_bytes", size, brief=True),
        own("seconds per step", "step_seconds", fixed, 2, brief=True),
        own("training tokens per second", "tokens_per_second", fixed, 0),
        own("steps", "steps", fixed, 0),
        held("τ untrained, held-out", "untrained", "tau", brief=True),
        held("τ trained, held-out", "trained", "tau", brief=True),
        Row("τ gained by training", gain("pruned"), gain("full"), brief=True),
        held("accuracy, held-out", "trained", "acc", percent, brief=True),
        held("agreement with the teacher's first choice", "trained", "teacher_agreement", percent),
        held("coverage of held-out labels", "trained", "coverage", percent, brief=True),
        held("kept mass of the teacher", "trained", "kept_mass", percent),
        # No relation: the two losses are taken over different ids.
        Row("loss, held-out", loss("pruned"), loss("full")),
    ]
