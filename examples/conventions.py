"""What each convention does to the number, on one worked example (docs/spec.md shows the table).

One block of three slots over six target ids, three of them kept.
Run: python examples/conventions.py
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxdraft import ObjectiveConfig, VocabularyMap, blocks, dflash, map_from_buffers
from jaxdraft.blocks import weights
from jaxdraft.metrics import tau_probabilistic
from jaxdraft.objective import coefficients, loss, slot_terms, weighted_sums
from jaxdraft.teacher import conditional_teacher, true_teacher
from jaxdraft.vocabulary import kept_ids

KEPT = [0, 2, 5]
ANCHOR = 0  # x[a], at position a = 0
LABELS = [2, 4, 5]  # target ids; 4 is pruned
DRAFT_LOGITS = [[0.0, 1.0, -1.0], [2.0, 0.0, 1.0], [0.5, 0.5, 1.5]]
TEACHER_LOGITS = [
    [0.0, -1.0, 2.0, 0.5, 0.0, 1.0],
    [1.0, 0.0, 0.0, -1.0, 2.0, 0.0],
    [0.0, 1.0, 1.5, 0.0, -0.5, 1.0],
]
OBJECTIVE = ObjectiveConfig(loss_decay_gamma=2.0)


Row = tuple[str, str, float, str, float]


def example_map() -> VocabularyMap:
    """The map that keeps KEPT of six ids."""
    return map_from_buffers(np.isin(np.arange(6), KEPT), np.array(KEPT) - np.arange(3))


def rows() -> Iterator[Row]:
    """Yield (quantity, this spec's choice, its value, the other choice, its value)."""
    vocabulary = example_map()
    kept = kept_ids(vocabulary)
    z, teacher = jnp.array([[DRAFT_LOGITS]]), jnp.array([[TEACHER_LOGITS]])
    labels = jnp.asarray(vocabulary.index)[jnp.array([[LABELS]])]
    conditional, true = conditional_teacher(teacher, kept), true_teacher(teacher, kept)
    terms = slot_terms(z, None, labels, conditional, true, prunes=True)
    w = weights(jnp.ones((1, 1, 3), bool), jnp.array(2.0), z.dtype)
    sums = weighted_sums(terms, w)
    inside = terms.kept.astype(z.dtype)

    ce = sums.ce_num / sums.ce_den
    yield (
        "cross entropy",
        "÷ Σ w·1[kept]",
        ce,
        "÷ Σ w, pruned labels counted",
        sums.ce_num / sums.den,
    )
    yield (
        "cross entropy",
        "÷ Σ w·1[kept]",
        ce,
        "÷ Σ 1[kept], no decay below",
        sums.ce_num / inside.sum(),
    )
    yield (
        "cross entropy",
        "÷ Σ w·1[kept]",
        ce,
        "÷ (Σ w·1[kept] + 1e-6)",
        sums.ce_num / (sums.ce_den + 1e-6),
    )
    late = weights(jnp.ones((1, 1, 3), bool), jnp.array(2.0), z.dtype)
    late = jnp.concatenate([late[..., :1], late[..., :-1]], axis=-1)
    other = weighted_sums(terms, late)
    yield "cross entropy", "decay from slot 0", ce, "decay from slot 1", other.ce_num / other.ce_den
    guess = conditional.argmax(axis=-1)
    from_teacher = slot_terms(z, None, guess, conditional, true, prunes=True)
    relabelled = weighted_sums(from_teacher, w)
    yield (
        "cross entropy",
        "label from the data",
        ce,
        "label = the teacher's argmax",
        relabelled.ce_num / relabelled.ce_den,
    )
    l1 = sums.l1_num / sums.den
    yield "L1 term", r"Σ\|q − p̃\|", l1, r"½·Σ\|q − p̃\|", l1 / 2
    q = jax.nn.softmax(z, axis=-1)
    renormalised = jnp.minimum(q, conditional).sum(axis=-1)
    yield (
        "mean acceptance",
        "true p, sums to the kept mass",
        terms.accept.mean(),
        "renormalised p̃, sums to 1",
        renormalised.mean(),
    )
    alphas = coefficients(OBJECTIVE, z.dtype)
    ours = loss(sums, sums.den, sums.ce_den, alphas, prunes=True)
    yield (
        "loss",
        "two denominators",
        ours,
        "one, as unpruned",
        loss(sums, sums.den, sums.ce_den, alphas, prunes=False),
    )
    yield from layout_rows()


def layout_rows() -> Iterator[Row]:
    """Yield what the same logits are worth when each slot is read one position earlier.

    In the other layout slot k speaks of x[a+k]: slot 0 of the anchor itself, which is not scored.
    """
    anchors, keep, m = jnp.zeros((1, 1), int), jnp.ones((1, 1), bool), jnp.ones((1, 4))
    names = ("cross entropy", "mean acceptance", "τ")
    ours = as_read(
        blocks.label_positions(anchors, keep, 3, 4),
        blocks.evaluation_mask(m, anchors, keep, 3),
        first=0,
    )
    others = as_read(
        dflash.label_positions(anchors, keep, 3, 4),
        dflash.evaluation_mask(m, anchors, keep, 3),
        first=1,
    )
    for name, value, other in zip(names, ours, others, strict=True):
        layouts = "anchor-first: slot k says x[a+1+k]", "bonus-anchor: slot k says x[a+k]"
        yield f"layout: {name}", layouts[0], value, layouts[1], other


def as_read(
    labels_at: Int[Array, "1 1 3"], mask: Bool[Array, "1 1 3"], first: int
) -> tuple[float, float, float]:
    """Cross entropy, mean acceptance and τ of the slots from `first` on, labels read there."""
    vocabulary = example_map()
    kept = kept_ids(vocabulary)
    x, teacher = jnp.array([[ANCHOR, *LABELS]]), jnp.array([TEACHER_LOGITS])
    # The teacher's row at a position speaks of the next one.
    rows_read = blocks.at_positions(teacher, blocks.teacher_positions(labels_at))[:, :, first:]
    z = jnp.array([[DRAFT_LOGITS]])[:, :, first:]
    labels = jnp.asarray(vocabulary.index)[blocks.at_positions(x, labels_at)][:, :, first:]
    terms = slot_terms(
        z,
        None,
        labels,
        conditional_teacher(rows_read, kept),
        true_teacher(rows_read, kept),
        prunes=True,
    )
    scored = mask[:, :, first:]
    # Decay starts at the first slot that is scored, in either layout (sheet §3).
    sums = weighted_sums(terms, weights(scored, jnp.array(2.0), z.dtype))
    length, count = tau_probabilistic(terms.accept, scored)
    return sums.ce_num / sums.ce_den, terms.accept.mean(), length / count


def table() -> str:
    """Return the rows as a Markdown table."""
    lines = ["| number | this spec | | elsewhere | |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {ours} | {float(value):.7f} | {other} | {float(changed):.7f} |"
        for name, ours, value, other, changed in rows()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(table())
