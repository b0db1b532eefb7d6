"""Conventions on which right programs differ, and the sheet's numbers under each (NumPy, float64).

Written from the sheet (§3, §7–§9, §12) and of no other code here: the draft's logits are given, the
blocks, both teachers, every term, the metric pairs and the loss follow. `parity judge` asks which
convention, if any, explains a number that differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from parity.cases import Array, Case

Pair = tuple[Array, Array]
NO_TARGET = "no supervised target tokens"
NO_KEPT_TARGET = "no in-vocabulary target tokens"


@dataclass(frozen=True)
class Conventions:
    """What an implementation does where the field is divided; the defaults are the sheet's.

    `NAMES` says what each other value means, in words.
    """

    layout: str = "sheet"
    mask: str = "sheet"
    label: str = "data"
    decay_from: str = "sheet"
    denominator: str = "weights"
    pruned_labels: str = "left out"
    epsilon: float = 0.0
    l1: str = "sum"
    acceptance: str = "true"
    calibration: str = "weights"
    dpace_denominator: str = "rows"
    window: str = "sheet"
    own_block: str = "sheet"

    def deviations(self) -> dict[str, Any]:
        """Return the fields that are not the sheet's."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }

    def told(self) -> list[str]:
        """Return the deviations in words."""
        return [NAMES[name, value] for name, value in self.deviations().items()]

    def drafting(self) -> Conventions:
        """Return those of the draft alone, the rest the sheet's."""
        return Conventions(window=self.window, own_block=self.own_block)

    def check(self) -> None:
        """Raise ValueError for a value that is not known, with those that are."""
        for name, value in self.deviations().items():
            if (name, value) not in NAMES:
                default = getattr(SHEET, name)
                known = [default, *(v for n, v in NAMES if n == name)]
                raise ValueError(
                    f"conventions: {name} is {value!r}; known are "
                    f"{', '.join(repr(v) for v in known)}"
                )


SHEET = Conventions()
DRAFTING = ("window", "own_block")  # what the draft says depends on these, the terms on the others
NAMES: dict[tuple[str, Any], str] = {
    ("layout", "anchor-first"): "slot k predicts x[a+1+k] (anchor-first layout)",
    ("layout", "bonus-anchor"): "slot k predicts x[a+k] (bonus-anchor layout)",
    ("mask", "prefix"): "one unsupervised label ends the block",
    ("mask", "labels"): "each label counts by itself, an unsupervised one does not end the block",
    ("mask", "inputs"): "slot k counts where x[a+k] is supervised, not its label",
    ("label", "teacher"): "the label is the teacher's argmax among kept ids",
    ("decay_from", "slot 1"): "decay starts at slot 1",
    ("denominator", "slots"): "denominators count slots, without the decay",
    ("pruned_labels", "counted"): "pruned labels stay in the cross entropy's denominator",
    ("epsilon", 1e-8): "1e-8 added to denominators",
    ("epsilon", 1e-6): "1e-6 added to denominators",
    ("epsilon", 1e-5): "1e-5 added to denominators",
    ("l1", "half"): "half of the L1 distance (total variation)",
    ("acceptance", "renormalised"): "acceptance against the renormalised teacher",
    ("calibration", "slots"): "confidence_abs_error over slots, without the decay",
    ("dpace_denominator", "slots"): "D-PACE's denominator counts slots, not rows",
    ("window", "anchor"): "a window counts from the anchor: every slot sees the ω states before it",
    ("own_block", "whole"): "slots of sliding layers see all of their own block",
}


@dataclass(frozen=True)
class Numbers:
    """What a case comes to: an error's words, or mask, acceptance, metric pairs and loss."""

    eval_mask: Array
    accept_probability: Array
    metrics: dict[str, Pair] = field(default_factory=dict)
    loss: float = 0.0
    error: str | None = None


def family(case: Case) -> str:
    """Return what a case is of: "dspark", "dflash" (D-PACE too) or "eagle3"."""
    if "eagle3" in case.extra or "dflash_config" not in case.config:
        return "eagle3"
    return str(case.config["dflash_config"]["projector_type"])


def recompute(
    case: Case,
    given: Conventions,
    draft_logits: Array,
    confidence_logits: Array | None,
    known: dict[Any, Any] | None = None,
) -> Numbers:
    """Compute a case's numbers under conventions, from logits [B, N, γ, K] (and [B, N, γ]).

    `known` keeps the slots' terms from one call to the next, of the same case and logits.
    """
    known = {} if known is None else known
    key = given.layout, given.mask, given.label, given.l1, given.acceptance
    slots = known[key] = known.get(key) or _Slots.read(case, given, draft_logits)
    M = slots.mask.astype(np.float64)
    w = M * _position_weights(case, given, slots)
    inside = M * slots.kept
    counted = w * slots.kept
    if given.denominator == "slots":
        ce_den, den = inside.sum(), M.sum()
    else:
        ce_den, den = counted.sum(), w.sum()
    if given.pruned_labels == "counted":
        ce_den = den
    c = None if confidence_logits is None else _at(confidence_logits, slots.mask)
    conf = 0.0 * M if c is None else _bce(c, slots.accept)
    sums = {"ce": counted * slots.ce, "l1": w * slots.l1, "conf": w * conf}
    num = {name: value.sum() for name, value in sums.items()}
    metrics = _metrics(case, given, slots, c, w)
    metrics |= {"ce_loss": (num["ce"], ce_den), "l1_loss": (num["l1"], den)}
    if family(case) == "dspark":
        metrics["confidence_loss"] = (num["conf"], den)
    loss, error = _loss(case, given, num, ce_den, den)
    pairs = {name: (np.asarray(a), np.asarray(b)) for name, (a, b) in metrics.items()}
    return Numbers(slots.mask, slots.accept, pairs, loss, error)


def draft_candidates(declared: Conventions) -> Iterator[Conventions]:
    """Yield the draft's conventions to try: declared, the sheet's, then every other."""
    yield declared.drafting()
    yield SHEET
    for window, own_block in product(("sheet", "anchor"), ("sheet", "whole")):
        yield Conventions(window=window, own_block=own_block)


def candidates(declared: Conventions) -> Iterator[Conventions]:
    """Yield conventions to try, the likeliest first: declared, the sheet's, then few changes.

    Those of the draft stay as they are: they have been found out before.
    """
    plain = declared.drafting()
    yield declared
    yield plain
    names_of_terms = [f.name for f in fields(Conventions) if f.name not in DRAFTING]
    for count in (1, 2, 3):
        for base in dict.fromkeys((plain, declared)):
            if base != plain and count > 2:
                continue
            for names in combinations(names_of_terms, count):
                others = ([v for n, v in NAMES if n == name] for name in names)
                for values in product(*others):
                    yield replace(base, **dict(zip(names, values, strict=True)))


@dataclass(frozen=True)
class _Slots:
    """Every slot of a case [B, N, γ]: what it is judged by, and its terms."""

    mask: Array
    draft_label: Array
    kept: Array
    teacher_choice: Array  # draft ids
    z: Array
    q: Array
    p: Array
    ce: Array
    l1: Array
    accept: Array
    first: int  # the first slot that predicts

    @classmethod
    def read(cls, case: Case, given: Conventions, draft_logits: Array) -> _Slots:
        label_at, teacher_at, mask, first = _positions(case, given)
        tokens = _gather(case.tensors["batch/input_ids"], label_at)
        V = case.config["vocab_size"]
        t2d = case.tensors.get("weights/t2d", np.ones(V, bool))
        ids = np.flatnonzero(t2d)
        index = np.full(V, -1)
        index[ids] = np.arange(len(ids))
        states = np.nan_to_num(_gather(case.tensors["batch/target_last_hidden_states"], teacher_at))
        logits = states.astype(np.float64) @ case.tensors["target/lm_head.weight"].T.astype(float)
        conditional, true = _softmax(logits[..., ids]), _softmax(logits)[..., ids]
        z = _at(draft_logits, mask)
        q = _softmax(z)
        choice = conditional.argmax(-1)
        if given.label == "teacher":
            draft_label, kept = choice, np.ones(choice.shape, bool)
        else:
            draft_label = np.where(
                (tokens >= 0) & (tokens < V), index[np.clip(tokens, 0, V - 1)], -1
            )
            kept = draft_label >= 0
        logq = z - z.max(-1, keepdims=True)
        logq = logq - np.log(np.exp(logq).sum(-1, keepdims=True))
        ce = -np.take_along_axis(logq, np.maximum(draft_label, 0)[..., None], -1)[..., 0]
        l1 = np.abs(q - conditional).sum(-1)
        against = conditional if given.acceptance == "renormalised" else true
        return cls(
            mask=mask,
            draft_label=draft_label,
            kept=kept,
            teacher_choice=choice,
            z=z,
            q=q,
            p=true,
            ce=np.where(kept, ce, 0.0),
            l1=l1 / 2 if given.l1 == "half" else l1,
            accept=np.clip(np.minimum(q, against).sum(-1), 0.0, 1.0),
            first=first,
        )


def _positions(case: Case, given: Conventions) -> tuple[Array, Array, Array, int]:
    """Return (label positions, teacher positions, evaluation mask, first predicting slot)."""
    anchors = case.tensors["batch/anchor_positions"].astype(int)
    keep = case.tensors["batch/block_keep_mask"].astype(bool)
    supervised = case.tensors["batch/loss_mask"] > 0.5
    S, gamma = supervised.shape[1], case.config["block_size"]
    bonus = given.layout == "bonus-anchor" or (given.layout == "sheet" and family(case) == "dflash")
    own = anchors[..., None] + np.arange(gamma)
    label_at = own if bonus else own + 1
    asked = own if given.mask == "inputs" else label_at
    mask = keep[..., None] & (asked < S) & _gather(supervised, np.minimum(asked, S - 1))
    first = 1 if bonus else 0
    mask[..., :first] = False
    if given.mask == "prefix" or (given.mask == "sheet" and not bonus):
        mask[..., first:] = np.logical_and.accumulate(mask[..., first:], axis=-1)
    return np.minimum(label_at, S - 1), np.clip(label_at - 1, 0, S - 1), mask, first


def _position_weights(case: Case, given: Conventions, slots: _Slots) -> Array:
    k = np.arange(slots.mask.shape[-1], dtype=np.float64)
    if case.objective.get("dpace", "none") != "none":
        return _dpace_weights(case, slots)
    decay = case.objective.get("loss_decay_gamma")
    if decay is None:
        return np.ones_like(k)
    late = given.decay_from == "slot 1" or slots.first == 1
    weights: Array = np.exp(-np.maximum(k - 1, 0) / decay if late else -k / decay)
    return weights


def _dpace_weights(case: Case, slots: _Slots) -> Array:
    beta = case.objective.get("beta") or 0.5
    c = np.where(slots.kept, np.exp(-slots.ce), 0.0)
    s = np.where(slots.mask, (1 - beta) * c + beta, 1.0)
    prefix = np.cumprod(s, -1)
    suffix = np.cumsum((slots.mask * prefix)[..., ::-1], -1)[..., ::-1]
    weights: dict[str, Array] = {
        "cumulative": prefix,
        "continuation": suffix / prefix,
        "both": suffix,
    }
    return weights[case.objective["dpace"]]


def _loss(
    case: Case, given: Conventions, num: Mapping[str, float], ce_den: float, den: float
) -> tuple[float, str | None]:
    dspark = family(case) == "dspark"
    ce_alpha = case.objective.get("ce_alpha", 0.1) if dspark else 1.0
    if given.epsilon == 0 and den == 0:
        return 0.0, NO_TARGET
    if given.epsilon == 0 and ce_alpha > 0 and ce_den == 0:
        return 0.0, NO_KEPT_TARGET
    ce = num["ce"] / (ce_den + given.epsilon) if ce_alpha else 0.0
    if case.objective.get("dpace", "none") != "none":
        rows = len(case.tensors["batch/input_ids"])
        slots = given.dpace_denominator == "slots"
        return float(num["ce"] / (ce_den + given.epsilon if slots else rows)), None
    if not dspark:
        return float(ce), None
    rest = case.objective.get("l1_alpha", 0.9) * num["l1"]
    rest += case.objective.get("confidence_alpha", 1.0) * num["conf"]
    return float(ce_alpha * ce + rest / (den + given.epsilon)), None


def _metrics(
    case: Case, given: Conventions, slots: _Slots, c: Array | None, w: Array
) -> dict[str, tuple[Any, Any]]:
    """Compute the rows of §9 but the three losses."""
    M = slots.mask.astype(np.float64)
    choice = slots.z.argmax(-1)
    right = M * ((choice == slots.draft_label) & slots.kept)
    total, blocks = M.sum(), M.any(-1).sum()
    first = slots.first
    prefix = np.cumprod((M * slots.accept)[..., first:], -1)
    per_slot = {"accuracy_position": (right, M), "accept_position": (M * slots.accept, M)}
    per_slot["ce_position"] = (M * slots.kept * slots.ce, M * slots.kept)
    rows: dict[str, tuple[Any, Any]] = {
        name: (a.sum((0, 1))[first:], b.sum((0, 1))[first:]) for name, (a, b) in per_slot.items()
    }
    rows |= {
        "acc": (right.sum(), total),
        "teacher_agreement": ((M * (choice == slots.teacher_choice)).sum(), total),
        "teacher_top1_prob": ((M * slots.p.max(-1)).sum(), total),
        "draft_top1_prob": ((M * slots.q.max(-1)).sum(), total),
        "tau_probabilistic": (blocks + prefix.sum(), float(blocks)),
    }
    if slots.q.shape[-1] < case.config["vocab_size"]:
        rows["draft_vocab_coverage"] = ((M * slots.kept).sum(), total)
        rows["teacher_kept_mass"] = ((M * slots.p.sum(-1)).sum(), total)
    if family(case) == "dspark":
        weights = M if given.calibration == "slots" else w
        den = total if "slots" in (given.calibration, given.denominator) else w.sum()
        sigma = None if c is None else 1 / (1 + np.exp(-c))
        off = 0.0 if sigma is None else (weights * np.abs(sigma - slots.accept)).sum()
        bias = 0.0
        if sigma is not None:
            predicted = np.cumprod((M * sigma)[..., first:], -1)
            bias = (M[..., first:] * (predicted - prefix)).sum()
        rows |= {"confidence_abs_error": (off, den), "confidence_cumprod_bias": (bias, total)}
    return rows


def _gather(values: Array, positions: Array) -> Array:
    """Read values [B, S, …] at positions [B, N, γ]."""
    rows = np.arange(len(values))[:, None, None]
    found: Array = values[rows, positions]
    return found


def _at(values: Array, mask: Array) -> Array:
    """Return values in float64, 0 at slots that do not count: those may hold anything."""
    wide = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return np.where(wide, values, 0.0).astype(np.float64)


def _softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    shares: Array = exponentials / exponentials.sum(-1, keepdims=True)
    return shares


def _bce(c: Array, share: Array) -> Array:
    """Binary cross entropy of logits against shares, without overflow."""
    loss: Array = np.maximum(c, 0) - c * share + np.log1p(np.exp(-np.abs(c)))
    return loss
