"""The DFlash draft: the bonus-anchor layout, its objectives, evaluation and gradients (§3, §12).

Slot k predicts x[a+k]; slot 0 holds the anchor itself and is not trained. A DFlash draft is the
backbone alone, z = h·U_Kᵀ: no Markov head, no confidence head, and its parameters are the
backbone's. Everything that is not defined here is the anchor-first layout's.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxdraft import blocks, dpace
from jaxdraft.backbone import Backbone
from jaxdraft.checks import is_real
from jaxdraft.config import DFLASH, DraftConfig, check_decay, check_layout
from jaxdraft.draft import DraftOutput
from jaxdraft.evaluate import (
    Batch,
    Evaluation,
    Target,
    fitting_map,
    read_slots,
    working_dtype,
)
from jaxdraft.metrics import Pair, Slots, metric_pairs
from jaxdraft.objective import Sums, weighted_sums
from jaxdraft.vocabulary import VocabularyMap, kept_ids


@dataclass(frozen=True)
class DFlashObjective:
    """The position weights of the cross entropy (sheet §12).

    With `dpace` "none" they decay by `loss_decay_gamma` (null means no decay), which is DFlash;
    with "cumulative", "continuation" or "both" they are D-PACE's, smoothed by `beta`, which is 0.5
    unless given, and null without D-PACE.

    Raises:
        ValueError: an unknown variant, a decay or beta out of its range, a decay beside a D-PACE
            variant, a beta without one; all named.
    """

    loss_decay_gamma: float | int | None = None
    dpace: str = "none"
    beta: float | int | None = None

    def __post_init__(self) -> None:
        check_decay(self.loss_decay_gamma)
        known = ("none", *dpace.VARIANTS)
        if self.dpace not in known:
            raise ValueError(
                f"dpace: expected one of {', '.join(map(repr, known))}; got {self.dpace!r}"
            )
        if self.beta is None:
            if self.dpace != "none":
                object.__setattr__(self, "beta", 0.5)  # frozen
        # β = 0 makes P 0 behind a pruned label, and R/P no number.
        elif not (is_real(self.beta) and 0 < self.beta <= 1):
            raise ValueError(f"beta: expected a number above 0 and up to 1, got {self.beta!r}")
        elif self.dpace == "none":
            raise ValueError(
                f"beta = {self.beta} would be ignored, because dpace = 'none' weighs no "
                f"probability: leave beta out, or set dpace to one of {dpace.VARIANTS}"
            )
        if self.dpace != "none" and self.loss_decay_gamma is not None:
            raise ValueError(
                f"loss_decay_gamma = {self.loss_decay_gamma} would be ignored, because dpace = "
                f"{self.dpace!r} replaces the decay: set it to null, or dpace to 'none'"
            )


class Labels(NamedTuple):
    """Labels (target ids), teacher positions and the evaluation mask."""

    tokens: Int[Array, "batch blocks γ"]
    teacher_at: Int[Array, "batch blocks γ"]
    mask: Bool[Array, "batch blocks γ"]


def label_positions(
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
    block_size: int,
    seq: int,
) -> Int[Array, "batch blocks γ"]:
    """Where the label of slot k is read: a+k, clamped to S−1, and 0 for dropped blocks.

    Args:
        anchors: a [batch blocks].
        keep: which blocks are kept [batch blocks].
        block_size: γ.
        seq: S.

    Returns:
        Positions in 0 … S−1 [batch blocks γ].

    Source: sheet §3, last paragraph; §12.
    """
    inside = jnp.minimum(blocks.positions(anchors, block_size), seq - 1)
    return jnp.where(keep[:, :, None], inside, 0)


def evaluation_mask(
    loss_mask: Float[Array, "batch seq"],
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
    block_size: int,
) -> Bool[Array, "batch blocks γ"]:
    """Which slots count: label in range ∧ label supervised ∧ block kept ∧ k > 0.

    No prefix product: each label stands for itself, also behind an unsupervised one.

    Args:
        loss_mask: m [batch seq].
        anchors: a [batch blocks].
        keep: which blocks are kept [batch blocks].
        block_size: γ.

    Returns:
        M [batch blocks γ].

    Source: sheet §12.
    """
    seq = loss_mask.shape[1]
    in_range = blocks.positions(anchors, block_size) <= seq - 1
    labels_at = label_positions(anchors, keep, block_size, seq)
    predicts = (jnp.arange(block_size) > 0)[None, None, :]
    on = blocks.at_positions(blocks.supervised(loss_mask), labels_at)
    return in_range & on & keep[:, :, None] & predicts


def read_labels(config: DraftConfig, batch: Batch) -> Labels:
    """What each slot has to say, and whether it counts.

    Args:
        config: gives γ.
        batch: ids, mask, anchors, kept blocks.

    Returns:
        Three arrays [batch blocks γ].

    Source: sheet §3.5, §12.
    """
    anchors, keep = batch.anchor_positions, batch.block_keep_mask
    labels_at = label_positions(anchors, keep, config.block_size, batch.input_ids.shape[1])
    return Labels(
        tokens=blocks.at_positions(batch.input_ids, labels_at),
        teacher_at=blocks.teacher_positions(labels_at),
        mask=evaluation_mask(batch.loss_mask, anchors, keep, config.block_size),
    )


def decayed_weights(
    mask: Bool[Array, "batch blocks γ"], decay: float | int | None, dtype: DTypeLike
) -> Float[Array, "batch blocks γ"]:
    """w = M · exp(−max(k−1, 0)/decay): slot 1 weighs 1; w = M when decay is None.

    Args:
        mask: the evaluation mask M [batch blocks γ].
        decay: `loss_decay_gamma`, or None.
        dtype: the working dtype.

    Returns:
        w [batch blocks γ].

    Source: sheet §3, last paragraph; §12.
    """
    if decay is None:
        return mask.astype(dtype)
    steps = jnp.maximum(jnp.arange(mask.shape[-1], dtype=dtype) - 1, 0)
    return mask.astype(dtype) * jnp.exp(-steps / decay)[None, None, :]


def position_weights(objective: DFlashObjective, slots: Slots) -> Float[Array, "batch blocks γ"]:
    """The objective's w: decayed, or D-PACE's.

    Args:
        objective: says which.
        slots: M, draft logits and labels.

    Returns:
        w [batch blocks γ], 0 where M is False, without a gradient.

    Source: sheet §12.
    """
    z = slots.draft_logits
    if objective.dpace == "none":
        return decayed_weights(slots.mask, objective.loss_decay_gamma, z.dtype)
    assert objective.beta is not None  # D-PACE's objectives have one
    c = dpace.label_probability(z, slots.draft_labels)
    return dpace.weights(objective.dpace, c, slots.mask, objective.beta)


def loss(
    ce_num: Float[Array, ""], total_ce_den: Float[Array, ""], ranks: int = 1
) -> Float[Array, ""]:
    """DFlash: this rank's share of the step's loss, W · Σ w·1[kept]·ce / Σ_ranks Σ w·1[kept].

    Label: from the data, as a draft id; a pruned label leaves numerator and denominator. Pruned
    and unpruned alike. D-PACE's loss is `dpace.loss`.

    Args:
        ce_num: this rank's Σ w·1[kept]·ce.
        total_ce_den: Σ w·1[kept] over all ranks and micro-batches of the step.
        ranks: W, the number of ranks that the gradients are averaged over.

    Returns:
        A scalar whose mean over ranks is the loss of the step.

    Source: sheet §12.
    """
    return ranks * ce_num / total_ce_den


def check_supervision(total_den: float, total_ce_den: float) -> None:
    """Refuse a step without anything to learn from, on sums over all ranks and micro-batches.

    Args:
        total_den: Σ w.
        total_ce_den: Σ w·1[kept].

    Raises:
        ValueError: `no supervised target tokens` when Σ w = 0; `no in-vocabulary target tokens`
            when Σ w·1[kept] = 0, for D-PACE too: its loss would be 0 and move nothing.

    Source: sheet §8; §12 has the cross entropy as its only term.
    """
    if total_den == 0:
        raise ValueError(
            "no supervised target tokens: no slot behind an anchor has a label with loss_mask > "
            "0.5; check loss_mask, anchor_positions and block_keep_mask"
        )
    if total_ce_den == 0:
        raise ValueError(
            "no in-vocabulary target tokens: the draft vocabulary keeps no label of the batch; "
            "raise draft_vocab_size, or rebuild the map from this corpus"
        )


def metric_rows(slots: Slots, sums: Sums, prunes: bool) -> dict[str, Pair]:
    """The rows of §9 that need no head, over slots 1 … γ−1; w is the objective's own.

    Args:
        slots: per-slot arrays [batch blocks γ …], finite where M is False.
        sums: the sums of the same batch.
        prunes: K < V.

    Returns:
        Name to (numerator, denominator): scalars, or [γ−1] for the rows `*_position`. No
        `confidence_*` rows.

    Source: sheet §9; §12, last sentence.
    """
    # Slot 0 never counts, so a product that starts there would be 0 in every block.
    predicting = jax.tree.map(lambda array: array[:, :, 1:], slots)
    pairs = metric_pairs(predicting, sums, prunes)
    return {name: pair for name, pair in pairs.items() if not name.startswith("confidence_")}


def run_draft(
    config: DraftConfig, params: Any, target: Target, kept: Int[Array, " kept"], batch: Batch
) -> DraftOutput:
    """The draft's forward pass on a batch: h from the backbone, z = h·U_Kᵀ.

    Args:
        config: what the draft is.
        params: the backbone's parameter tree.
        target: E and U.
        kept: the kept target ids [kept].
        batch: the batch.

    Returns:
        h and z of every slot; no confidence logits.

    Source: sheet §3.2, §4, §5, §12.
    """
    anchors, keep = batch.anchor_positions, batch.block_keep_mask
    tokens = blocks.draft_tokens(
        batch.input_ids, anchors, keep, config.block_size, config.mask_token_id
    )
    backbone = Backbone(config, working_dtype(params))
    embedded = target.embed_tokens[tokens]
    h = backbone.apply({"params": params}, batch.hidden_states, embedded, anchors, keep)
    z = jnp.einsum("bnjh,kh->bnjk", h, target.lm_head[kept])
    return DraftOutput(hidden=h, logits=z, confidence_logits=None)


def evaluation(
    params: Any,
    config: DraftConfig,
    objective: DFlashObjective,
    target: Target,
    vocabulary: VocabularyMap,
    batch: Batch,
) -> tuple[Float[Array, ""], Evaluation]:
    """Loss, metrics and slot arrays of one batch on one rank; traceable, raises nothing.

    Args:
        params: the parameter tree.
        config: what the draft is (static).
        objective: the position weights (static).
        target: E and U.
        vocabulary: the map.
        batch: the batch.

    Returns:
        The loss, and the evaluation that holds it, as `jax.value_and_grad` wants them.

    Source: sheet §3–§9, §12.
    """
    labels = read_labels(config, batch)
    out = run_draft(config, params, target, kept_ids(vocabulary), batch)
    slots = read_slots(
        config, target, vocabulary, batch, labels.mask, labels.tokens, labels.teacher_at, out
    )
    slots = slots._replace(weights=position_weights(objective, slots))
    sums = weighted_sums(slots.terms, slots.weights)
    if objective.dpace == "none":
        value = loss(sums.ce_num, sums.ce_den)
    else:
        value = dpace.loss(sums.ce_num, batch.input_ids.shape[0])
    return value, Evaluation(
        loss=value,
        metrics=metric_rows(slots, sums, config.prunes),
        accept_probability=slots.terms.accept,
        eval_mask=slots.mask,
        draft_logits=out.logits,
        hidden=out.hidden,
        confidence_logits=None,
    )


_evaluation = partial(jax.jit, static_argnums=(1, 2))(evaluation)
_gradients = partial(jax.jit, static_argnums=(1, 2))(jax.value_and_grad(evaluation, has_aux=True))


def evaluate_dflash(
    config: DraftConfig,
    objective: DFlashObjective,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    batch: Batch,
) -> Evaluation:
    """What a DFlash draft is worth on a batch (one rank, one micro-batch).

    Args:
        config: what the draft is, with `projector_type` "dflash".
        objective: the position weights.
        params: the backbone's parameter tree; its dtype is the working dtype.
        target: E and U, each [V, H].
        vocabulary: the map; None only for an unpruned draft.
        batch: the batch.

    Returns:
        Loss, metric pairs and slot arrays; slot 0 is never in `eval_mask`.

    Raises:
        ValueError: nothing is supervised (the two errors of §8), the map does not fit the
            config, or the config is of the other layout (`jaxdraft.evaluate`).

    Source: sheet §3–§9, §12.
    """
    check_layout(config, DFLASH)
    vocabulary = fitting_map(config, vocabulary)
    _, result = _evaluation(params, config, objective, target, vocabulary, batch)
    _check(result)
    return result


def gradients_dflash(
    config: DraftConfig,
    objective: DFlashObjective,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    batch: Batch,
) -> tuple[Evaluation, Any]:
    """`evaluate_dflash`, and d loss / d parameter for every parameter, the weights held fixed.

    Args:
        config: what the draft is, with `projector_type` "dflash".
        objective: the position weights.
        params: the backbone's parameter tree; its dtype is the working dtype.
        target: E and U, each [V, H].
        vocabulary: the map; None only for an unpruned draft.
        batch: the batch.

    Returns:
        The evaluation, and gradients in the tree of the parameters.

    Raises:
        ValueError: as `evaluate_dflash`.

    Source: sheet §12.
    """
    check_layout(config, DFLASH)
    vocabulary = fitting_map(config, vocabulary)
    (_, result), grads = _gradients(params, config, objective, target, vocabulary, batch)
    _check(result)
    return result, grads


def _check(result: Evaluation) -> None:
    check_supervision(float(result.metrics["l1_loss"][1]), float(result.metrics["ce_loss"][1]))
