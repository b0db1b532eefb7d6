"""From arrays to an evaluation and its gradients: §3 to §9 of the sheet, put together."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxdraft import blocks, teacher
from jaxdraft.config import DraftConfig, ObjectiveConfig
from jaxdraft.draft import DraftOutput, DSparkDraft
from jaxdraft.eagle3_config import Eagle3Config
from jaxdraft.metrics import Pair, Slots, metric_pairs
from jaxdraft.objective import (
    Coefficients,
    check_supervision,
    coefficients,
    counted_rows,
    loss,
    slot_terms,
    weighted_sums,
)
from jaxdraft.vocabulary import VocabularyMap, identity_map, kept_ids


class Batch(NamedTuple):
    """Token ids x, loss mask m, captured states F, final states T, anchors and kept blocks."""

    input_ids: Int[Array, "batch seq"]
    loss_mask: Float[Array, "batch seq"]
    hidden_states: Float[Array, "batch seq captured"]
    target_last_hidden_states: Float[Array, "batch seq hidden"]
    anchor_positions: Int[Array, "batch blocks"]
    block_keep_mask: Bool[Array, "batch blocks"]


class Target(NamedTuple):
    """The frozen target's embedding E and head U."""

    embed_tokens: Float[Array, "vocab hidden"]
    lm_head: Float[Array, "vocab hidden"]


class Evaluation(NamedTuple):
    """What a draft is worth on a batch; slots outside `eval_mask` are unspecified."""

    loss: Float[Array, ""]
    metrics: dict[str, Pair]
    accept_probability: Float[Array, "batch blocks γ"]
    eval_mask: Bool[Array, "batch blocks γ"]
    draft_logits: Float[Array, "batch blocks γ kept"]
    hidden: Float[Array, "batch blocks γ hidden"]
    confidence_logits: Float[Array, "batch blocks γ"] | None


class Labels(NamedTuple):
    """Labels and previous tokens (target ids), teacher positions and the evaluation mask."""

    tokens: Int[Array, "batch blocks γ"]
    previous: Int[Array, "batch blocks γ"]
    teacher_at: Int[Array, "batch blocks γ"]
    mask: Bool[Array, "batch blocks γ"]


def read_labels(config: DraftConfig, batch: Batch) -> Labels:
    """What each slot has to say, and whether it counts.

    Args:
        config: gives γ.
        batch: ids, mask, anchors, kept blocks.

    Returns:
        Four arrays [batch blocks γ].

    Source: sheet §3.3–§3.5.
    """
    anchors, keep = batch.anchor_positions, batch.block_keep_mask
    labels_at = blocks.label_positions(anchors, keep, config.block_size, batch.input_ids.shape[1])
    tokens = blocks.at_positions(batch.input_ids, labels_at)
    anchor_tokens = blocks.at_positions(batch.input_ids, anchors)
    return Labels(
        tokens=tokens,
        previous=blocks.previous_tokens(anchor_tokens, tokens),
        teacher_at=blocks.teacher_positions(labels_at),
        mask=blocks.evaluation_mask(batch.loss_mask, anchors, keep, config.block_size),
    )


def run_draft(
    config: DraftConfig,
    detach_confidence: bool,
    params: Any,
    target: Target,
    kept: Int[Array, " kept"],
    batch: Batch,
    previous: Int[Array, "batch blocks γ"],
) -> DraftOutput:
    """The draft's forward pass on a batch, teacher-forced.

    Args:
        config: what the draft is.
        detach_confidence: cut the confidence head's inputs from its gradient.
        params: the parameter tree.
        target: E and U.
        kept: the kept target ids [kept].
        batch: the batch.
        previous: previous tokens, target ids [batch blocks γ].

    Returns:
        h, z and c of every slot.

    Source: sheet §3.2, §4–§6.
    """
    anchors, keep = batch.anchor_positions, batch.block_keep_mask
    tokens = blocks.draft_tokens(
        batch.input_ids, anchors, keep, config.block_size, config.mask_token_id
    )
    return DSparkDraft(config).apply(
        {"params": params},
        batch.hidden_states,
        target.embed_tokens[tokens],
        anchors,
        keep,
        previous,
        target.lm_head[kept],
        detach_confidence,
    )


def read_slots(
    config: DraftConfig,
    target: Target,
    vocabulary: VocabularyMap,
    batch: Batch,
    mask: Bool[Array, "batch blocks γ"],
    tokens: Int[Array, "batch blocks γ"],
    teacher_at: Int[Array, "batch blocks γ"],
    out: DraftOutput,
) -> Slots:
    """What every slot says against what it is taught, in either layout, weighted by M alone.

    Args:
        config: says whether the draft prunes.
        target: E and U.
        vocabulary: the map.
        batch: gives T.
        mask: M [batch blocks γ].
        tokens: labels, target ids [batch blocks γ].
        teacher_at: where each slot's teacher stands [batch blocks γ].
        out: the draft's logits, and its confidence logits if it has that head.

    Returns:
        The slots, finite where M is False; their weights are M, before any decay.

    Source: sheet §7, §8.
    """
    kept, c = kept_ids(vocabulary), out.confidence_logits
    z = counted_rows(mask, out.logits)
    c = None if c is None else jnp.where(mask, c, 0)
    states = blocks.at_positions(batch.target_last_hidden_states, teacher_at)
    teacher_z = counted_rows(mask, teacher.teacher_logits(states, target.lm_head))
    conditional = teacher.conditional_teacher(teacher_z, kept)
    true = teacher.true_teacher(teacher_z, kept)
    draft_labels = jnp.asarray(vocabulary.index)[jnp.where(mask, tokens, 0)]
    terms = slot_terms(z, c, draft_labels, conditional, true, config.prunes)
    w = mask.astype(z.dtype)
    return Slots(mask, w, draft_labels, z, c, teacher_z[..., kept], true, terms)


def evaluation(
    config: DraftConfig,
    detach_confidence: bool,
    alphas: Coefficients,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap,
    batch: Batch,
) -> Evaluation:
    """Loss, metrics and slot arrays of one batch on one rank; traceable, raises nothing.

    Args:
        config: what the draft is (static).
        detach_confidence: see `ObjectiveConfig` (static).
        alphas: α's and decay, scalars.
        params: the parameter tree.
        target: E and U.
        vocabulary: the map.
        batch: the batch.

    Returns:
        The evaluation; its loss is no number when nothing is supervised.

    Source: sheet §3–§9.
    """
    kept, labels = kept_ids(vocabulary), read_labels(config, batch)
    out = run_draft(config, detach_confidence, params, target, kept, batch, labels.previous)
    slots = read_slots(
        config, target, vocabulary, batch, labels.mask, labels.tokens, labels.teacher_at, out
    )
    slots = slots._replace(weights=blocks.weights(slots.mask, alphas.decay, out.logits.dtype))
    sums = weighted_sums(slots.terms, slots.weights)
    return Evaluation(
        loss=loss(sums, sums.den, sums.ce_den, alphas, config.prunes),
        metrics=metric_pairs(slots, sums, config.prunes),
        accept_probability=slots.terms.accept,
        eval_mask=slots.mask,
        draft_logits=out.logits,
        hidden=out.hidden,
        confidence_logits=out.confidence_logits,
    )


def loss_and_evaluation(
    params: Any,
    config: DraftConfig,
    detach_confidence: bool,
    alphas: Coefficients,
    target: Target,
    vocabulary: VocabularyMap,
    batch: Batch,
) -> tuple[Float[Array, ""], Evaluation]:
    """`evaluation` with the parameters first and the loss apart, as `jax.value_and_grad` wants it.

    Args:
        params: the parameter tree.
        config: what the draft is (static).
        detach_confidence: see `ObjectiveConfig` (static).
        alphas: α's and decay, scalars.
        target: E and U.
        vocabulary: the map.
        batch: the batch.

    Returns:
        The loss, and the evaluation that holds it.
    """
    result = evaluation(config, detach_confidence, alphas, params, target, vocabulary, batch)
    return result.loss, result


_evaluation = partial(jax.jit, static_argnums=(0, 1))(evaluation)
_gradients = partial(jax.jit, static_argnums=(1, 2))(
    jax.value_and_grad(loss_and_evaluation, has_aux=True)
)


def evaluate(
    config: DraftConfig,
    objective: ObjectiveConfig,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    batch: Batch,
) -> Evaluation:
    """What the draft is worth on a batch (one rank, one micro-batch).

    Args:
        config: what the draft is.
        objective: the coefficients.
        params: the parameter tree; its dtype is the working dtype.
        target: E and U, each [V, H].
        vocabulary: the map; None only for an unpruned draft.
        batch: the batch.

    Returns:
        Loss, metric pairs and slot arrays.

    Raises:
        ValueError: nothing is supervised (the two errors of §8), the map does not fit the
            config, or the config is of the other layout (`jaxdraft.dflash`).

    Source: sheet §3–§9.
    """
    vocabulary = fitting_map(config, vocabulary)
    alphas = coefficients(objective, working_dtype(params))
    result = _evaluation(
        config, objective.detach_confidence, alphas, params, target, vocabulary, batch
    )
    _check(objective, result)
    return result


def gradients(
    config: DraftConfig,
    objective: ObjectiveConfig,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    batch: Batch,
) -> tuple[Evaluation, Any]:
    """`evaluate`, and d loss / d parameter for every parameter.

    Args:
        config: what the draft is.
        objective: the coefficients.
        params: the parameter tree; its dtype is the working dtype.
        target: E and U, each [V, H].
        vocabulary: the map; None only for an unpruned draft.
        batch: the batch.

    Returns:
        The evaluation, and gradients in the tree of the parameters.

    Raises:
        ValueError: as `evaluate`.

    Source: sheet §8.
    """
    vocabulary = fitting_map(config, vocabulary)
    alphas = coefficients(objective, working_dtype(params))
    (_, result), grads = _gradients(
        params, config, objective.detach_confidence, alphas, target, vocabulary, batch
    )
    _check(objective, result)
    return result, grads


def fitting_map(
    config: DraftConfig | Eagle3Config, vocabulary: VocabularyMap | None
) -> VocabularyMap:
    """The map to use: the given one if it fits the config, the identity for an unpruned draft.

    Args:
        config: gives V and K.
        vocabulary: the map, or None.

    Returns:
        A map with t2d[V] and d2t[K].

    Raises:
        ValueError: a pruned draft without a map, or a map of other sizes.

    Source: contracts §1; field note 2.
    """
    V, K = config.vocab_size, config.draft_vocab_size
    if vocabulary is None:
        if config.prunes:
            raise ValueError(
                f"draft_vocab_size = {K} prunes vocab_size = {V} but no vocabulary map is given: "
                "build one from counts, or read the checkpoint's t2d and d2t"
            )
        return identity_map(V)
    sizes = vocabulary.t2d.shape[0], vocabulary.d2t.shape[0]
    if sizes != (V, K):
        raise ValueError(
            f"the vocabulary map has V = {sizes[0]}, K = {sizes[1]} but the config says "
            f"vocab_size = {V}, draft_vocab_size = {K}: use the map of this draft"
        )
    return vocabulary


def working_dtype(params: Any) -> np.dtype:
    """The dtype of the parameters, which is the dtype of the computation.

    Args:
        params: the parameter tree.

    Returns:
        float32 or float64.

    Raises:
        ValueError: the parameters have several dtypes.

    Source: sheet §11.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    if len(dtypes) != 1:
        raise ValueError(
            f"params: expected one dtype, got {sorted(map(str, dtypes))}; cast the tree to one"
        )
    return dtypes.pop()


def _check(objective: ObjectiveConfig, result: Evaluation) -> None:
    total_den, total_ce_den = result.metrics["l1_loss"][1], result.metrics["ce_loss"][1]
    check_supervision(objective, float(total_den), float(total_ce_den))
