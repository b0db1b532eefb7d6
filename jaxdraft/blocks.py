"""Draft blocks: anchors, inputs, labels, masks, weights (sheet §3) and visibility (§4).

Shapes: batch B, sequence S, blocks N, slots γ. `anchors` and `keep` are [batch blocks].
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key


def supervised(loss_mask: Float[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    """Where a position is supervised: m > 0.5.

    Args:
        loss_mask: m [batch seq].

    Returns:
        Mask [batch seq].

    Source: sheet §1.
    """
    return loss_mask > 0.5


def candidates(loss_mask: Float[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    """Where an anchor may stand: a and a+1 are both supervised, 0 ≤ a ≤ S−2.

    Args:
        loss_mask: m [batch seq].

    Returns:
        Mask [batch seq]; the last position is never a candidate.

    Source: sheet §3.1; field note 8.

    >>> candidates(jnp.array([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]]))[0].nonzero()[0].tolist()
    [3, 4]
    """
    here = supervised(loss_mask)
    after = jnp.pad(here[:, 1:], ((0, 0), (0, 1)))
    return here & after


def sample_keys(seed: int, epoch: int, sample_ids: Int[Array, " batch"]) -> Key[Array, " batch"]:
    """One random key per row, a function of (seed, epoch, sample id) alone.

    Args:
        seed: the run's seed.
        epoch: the pass over the data.
        sample_ids: which sample each row holds [batch].

    Returns:
        Keys [batch] for `draw_anchors`.

    Source: sheet §3.1, last sentence.
    """
    of_epoch = jax.random.fold_in(jax.random.key(seed), epoch)
    return jax.vmap(lambda sample: jax.random.fold_in(of_epoch, sample))(sample_ids)


def draw_anchors(
    key: Key[Array, "..."], loss_mask: Float[Array, "batch seq"], N: int
) -> tuple[Int[Array, "batch blocks"], Bool[Array, "batch blocks"]]:
    """Up to N distinct candidates per row, uniformly, without replacement, ascending.

    The width is min(N, largest candidate count in the batch), at least 1; short rows are padded
    with a = 0, keep = False, after the drawn ones. The width depends on the mask's values, so this
    runs on concrete arrays. A row's draw depends on its key and its own mask, not on the padding.

    Args:
        key: one key for the batch, or one per row [batch] (`sample_keys`).
        loss_mask: m [batch seq].
        N: the most anchors a row may have, ≥ 1.

    Returns:
        anchor_positions [batch blocks] and block_keep_mask [batch blocks].

    Raises:
        ValueError: N is below 1.

    Source: sheet §3.1.
    """
    anchors, keep = draw_padded_anchors(key, loss_mask, N)
    width = max(1, int(keep.sum(axis=1).max()))
    return anchors[:, :width], keep[:, :width]


def draw_padded_anchors(
    key: Key[Array, "..."], loss_mask: Float[Array, "batch seq"], N: int
) -> tuple[Int[Array, "batch blocks"], Bool[Array, "batch blocks"]]:
    """The draw of `draw_anchors` at a width that no value decides, so that it can be traced.

    The width is min(N, S); what no candidate fills is padding, a = 0 and keep = False, which no
    loss and no metric sees.

    Args:
        key: one key for the batch, or one per row [batch] (`sample_keys`).
        loss_mask: m [batch seq].
        N: the most anchors a row may have, ≥ 1.

    Returns:
        anchor_positions [batch blocks] and block_keep_mask [batch blocks].

    Raises:
        ValueError: N is below 1.

    Source: sheet §3.1.
    """
    if N < 1:
        raise ValueError(f"N (anchors per sequence): expected at least 1, got {N}")
    batch, seq = loss_mask.shape
    keys = key if key.ndim else jax.random.split(key, batch)
    allowed = candidates(loss_mask)
    # The s-th draw of a key does not depend on how many are drawn: padding a row changes nothing.
    score = jax.vmap(lambda row: jax.random.bits(row, (seq,)))(keys)
    chosen = jnp.lexsort((score, ~allowed), axis=1)[:, :N]
    keep = jnp.arange(chosen.shape[1])[None, :] < allowed.sum(axis=1)[:, None]
    ascending = jnp.sort(jnp.where(keep, chosen, seq), axis=1)
    return jnp.where(keep, ascending, 0), keep


def positions(anchors: Int[Array, "batch blocks"], block_size: int) -> Int[Array, "batch blocks γ"]:
    """Where each slot of a block stands: a, a+1, …, a+γ−1.

    Args:
        anchors: a [batch blocks].
        block_size: γ.

    Returns:
        Positions [batch blocks γ].

    Source: sheet §3.2.
    """
    slots = jnp.arange(block_size, dtype=anchors.dtype)
    return anchors[:, :, None] + slots[None, None, :]


def draft_tokens(
    input_ids: Int[Array, "batch seq"],
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
    block_size: int,
    mask_token_id: int,
) -> Int[Array, "batch blocks γ"]:
    """What the draft reads: x[a], then γ−1 mask tokens; only mask tokens in a dropped block.

    Args:
        input_ids: x [batch seq].
        anchors: a [batch blocks].
        keep: which blocks are kept [batch blocks].
        block_size: γ.
        mask_token_id: the mask token.

    Returns:
        Target ids [batch blocks γ].

    Source: sheet §3.2.
    """
    first = jnp.where(keep, at_positions(input_ids, anchors), mask_token_id)
    masks = jnp.full((*anchors.shape, block_size - 1), mask_token_id, dtype=input_ids.dtype)
    return jnp.concatenate([first[:, :, None], masks], axis=-1)


def label_positions(
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
    block_size: int,
    seq: int,
) -> Int[Array, "batch blocks γ"]:
    """Where the label of slot k is read: a+1+k, clamped to S−1, and 0 for dropped blocks.

    Args:
        anchors: a [batch blocks].
        keep: which blocks are kept [batch blocks].
        block_size: γ.
        seq: S.

    Returns:
        Positions in 0 … S−1 [batch blocks γ].

    Source: sheet §3.3.
    """
    inside = jnp.minimum(positions(anchors, block_size) + 1, seq - 1)
    return jnp.where(keep[:, :, None], inside, 0)


def evaluation_mask(
    loss_mask: Float[Array, "batch seq"],
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
    block_size: int,
) -> Bool[Array, "batch blocks γ"]:
    """Which slots count: label in range ∧ label supervised ∧ block kept, prefix product.

    One unsupervised label ends the block.

    Args:
        loss_mask: m [batch seq].
        anchors: a [batch blocks].
        keep: which blocks are kept [batch blocks].
        block_size: γ.

    Returns:
        M [batch blocks γ].

    Source: sheet §3.3.
    """
    seq = loss_mask.shape[1]
    in_range = positions(anchors, block_size) + 1 <= seq - 1
    labels_at = label_positions(anchors, keep, block_size, seq)
    counts = in_range & at_positions(supervised(loss_mask), labels_at) & keep[:, :, None]
    return jnp.cumprod(counts.astype(anchors.dtype), axis=-1) == 1


def previous_tokens(
    anchor_tokens: Int[Array, "batch blocks"], labels: Int[Array, "batch blocks γ"]
) -> Int[Array, "batch blocks γ"]:
    """The token before slot k: x[a] for k = 0, else the label of slot k−1; always a target id.

    Args:
        anchor_tokens: x[a] [batch blocks].
        labels: target ids [batch blocks γ].

    Returns:
        Target ids [batch blocks γ].

    Source: sheet §3.4.
    """
    return jnp.concatenate([anchor_tokens[:, :, None], labels[:, :, :-1]], axis=-1)


def teacher_positions(labels_at: Int[Array, "batch blocks γ"]) -> Int[Array, "batch blocks γ"]:
    """Where the teacher of slot k stands: label position − 1, clamped to 0.

    Args:
        labels_at: label positions [batch blocks γ].

    Returns:
        Positions [batch blocks γ].

    Source: sheet §3.5.
    """
    return jnp.maximum(labels_at - 1, 0)


def weights(
    mask: Bool[Array, "batch blocks γ"], decay: Float[Array, ""] | None, dtype: DTypeLike
) -> Float[Array, "batch blocks γ"]:
    """w = M · exp(−k/decay), k from 0; w = M when decay is None.

    Args:
        mask: the evaluation mask M [batch blocks γ].
        decay: the config's `loss_decay_gamma`, or None.
        dtype: the working dtype.

    Returns:
        w [batch blocks γ].

    Source: sheet §3.6; paper §3.3.
    """
    if decay is None:
        return mask.astype(dtype)
    slots = jnp.arange(mask.shape[-1], dtype=dtype)
    return mask.astype(dtype) * jnp.exp(-slots / decay)[None, None, :]


def context_visibility(
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
    block_size: int,
    seq: int,
    window: int | None,
) -> Bool[Array, "batch blocks γ seq"]:
    """Which context position s the query (block n, slot j) sees: s < a_n, in kept blocks.

    With a sliding window ω also s ≥ a_n + j − (ω−1).

    Args:
        anchors: a [batch blocks].
        keep: which blocks are kept [batch blocks].
        block_size: γ.
        seq: S.
        window: ω, or None for full attention.

    Returns:
        Mask [batch blocks γ seq].

    Source: sheet §4; field note 7.
    """
    context = jnp.arange(seq, dtype=anchors.dtype)[None, None, None, :]
    visible = keep[:, :, None, None] & (context < anchors[:, :, None, None])
    queries_at = positions(anchors, block_size)[:, :, :, None]
    reach = seq + block_size if window is None else window
    return visible & (context >= queries_at - (reach - 1))


def own_visibility(
    keep: Bool[Array, "batch blocks"], block_size: int, causal: bool
) -> Bool[Array, "batch blocks γ γ"]:
    """Which slots of its own block a query sees: all, or in sliding layers all slots ≤ j.

    The window does not cut inside the block. A dropped block sees nothing.

    Args:
        keep: which blocks are kept [batch blocks].
        block_size: γ.
        causal: True in sliding layers.

    Returns:
        Mask [batch blocks γ γ], query slot before key slot.

    Source: sheet §4.
    """
    square = jnp.ones((block_size, block_size), dtype=keep.dtype)
    inside = jnp.tril(square) if causal else square
    return keep[:, :, None, None] & inside[None, None, :, :]


def at_positions(values: Array, at: Int[Array, "batch *slots"]) -> Array:
    """Read each row's own values: values[b, at[b, …]].

    Args:
        values: [batch seq *features].
        at: positions [batch *slots].

    Returns:
        [batch *slots *features].
    """
    return jax.vmap(lambda row, index: row[index])(values, at)
