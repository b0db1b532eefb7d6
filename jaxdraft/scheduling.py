"""How many proposals to verify, from confidences (sheet §6, §10), and calibrating confidences.

Shapes: requests R, slots of a block γ. c are confidence logits, α acceptances. The survival of
slot j is the probability that slots 0 … j are all accepted, as the confidence head predicts it.

`schedule` and `fit_temperatures` are **reconstructions**: they were written from what the DSpark
paper's Algorithm 1 and its sequential temperature scaling are called and are for, without the
paper's text, and may differ from it in detail.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

StepTime = Callable[[int], float | int]


def scaled(c: Float[Array, "*rows γ"], temperatures: Float[Array, " γ"]) -> Float[Array, "*rows γ"]:
    """c_j / T_j: confidence logits with one temperature per slot position.

    Args:
        c: confidence logits [*rows γ].
        temperatures: T > 0 [γ].

    Returns:
        [*rows γ].

    Source: this module's note on reconstruction.
    """
    return c / jnp.broadcast_to(temperatures, c.shape)


def survival(c: Float[Array, "*rows γ"]) -> Float[Array, "*rows γ"]:
    """Π_{k≤j} σ(c_k): the predicted probability that slot j is reached and accepted.

    Args:
        c: confidence logits [*rows γ].

    Returns:
        Never ascending along a block [*rows γ].

    Source: sheet §6, §9 (`confidence_cumprod_bias`).
    """
    return jnp.cumprod(jax.nn.sigmoid(c), axis=-1)


def confident_prefix(c: Float[Array, "*rows γ"], threshold: float | int) -> Int[Array, "*rows"]:
    """The longest prefix whose survival stays ≥ threshold.

    Keeping slot j depends on c_0 … c_j only, that is on tokens before slot j: decoding with it
    stays exact.

    Args:
        c: confidence logits [*rows γ].
        threshold: from 0 (keep all) to 1.

    Returns:
        Lengths, 0 to γ [*rows].

    Raises:
        ValueError: threshold is outside [0, 1].

    Source: issue 3, confidence-based prefix truncation.

    >>> int(confident_prefix(jnp.array([2.0, 0.0, 5.0]), threshold=0.5))
    1
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold: expected a probability from 0 to 1, got {threshold}")
    return (survival(c) >= threshold).sum(axis=-1)


def throughput(
    survivals: Float[Array, "requests γ"], lengths: Int[Array, " requests"], step_time: StepTime
) -> float:
    """Expected tokens per unit of time of one verification step over a batch.

    (R + Σ_r Σ_{j<ℓ_r} survival_rj) / step_time(R + Σ_r ℓ_r): each request verifies its anchor and
    ℓ_r proposals, and gets one token beyond the accepted ones.

    Args:
        survivals: [requests γ].
        lengths: ℓ, proposals to verify per request [requests].
        step_time: time of a step by the number of tokens in the batch.

    Returns:
        Tokens per unit of time.

    Source: this module's note on reconstruction.
    """
    requests, slots = survivals.shape
    chosen = jnp.arange(slots)[None, :] < lengths[:, None]
    expected = requests + float(jnp.where(chosen, survivals, 0).sum())
    return expected / step_time(requests + int(lengths.sum()))


def schedule(survivals: Float[Array, "requests γ"], step_time: StepTime) -> Int[Array, " requests"]:
    """Hardware-aware prefix lengths: as many proposals as raise the expected throughput.

    A reconstruction of the paper's Algorithm 1 without its text. Candidates (request, slot) are
    admitted in descending order of survival, ties to the earlier slot, then to the lower request;
    as survival never ascends along a block, what is admitted are prefixes. The first candidate
    that lowers `throughput` ends it, and is not admitted (the early stop).

    When the early stop loses nothing: gains descend by construction, so the expected tokens are
    concave in the number admitted. If the marginal time of a token never descends (step_time is
    convex), the ratio has a single peak, the first fall is final, and the result is the best of
    all combinations of lengths. It is not for a stepwise time: one request, survivals 0.9, 0.9,
    0.9, a step of time 1 up to 1 token and 2 up to 4: throughput 1, 0.95, 1.4, 1.85. The early
    stop verifies nothing, the best is all three.

    Why stop early all the same: whether a slot is admitted then depends on its own survival and
    larger ones, so on no token at or after that slot, and decoding stays exact. Taking the best
    of all lengths looks at later confidences, which know the token that is to be judged, and
    shifts the output distribution (the tests enumerate both).

    Args:
        survivals: never ascending along a block [requests γ].
        step_time: time of a step by the number of tokens in the batch, > 0.

    Returns:
        ℓ, proposals to verify per request, 0 to γ [requests].

    Raises:
        ValueError: a row ascends or leaves [0, 1], or a time is not above 0.

    Source: paper Algorithm 1 (reconstructed); issue 3.
    """
    _check_survivals(survivals)
    requests = survivals.shape[0]
    lengths, expected = [0] * requests, float(requests)
    best = expected / _positive_time(step_time, requests)
    by_slot = survivals.T.reshape(-1)
    for admitted, candidate in enumerate(jnp.argsort(-by_slot, stable=True).tolist(), start=1):
        slot, request = divmod(candidate, requests)
        expected += float(by_slot[candidate])
        raised = expected / _positive_time(step_time, requests + admitted)
        if raised < best:
            break
        best, lengths[request] = raised, slot + 1
    return jnp.asarray(lengths)


def cumulative_cross_entropy(
    log_reached: Float[Array, "*rows samples"],
    log_missed: Float[Array, "*rows samples"],
    reached: Float[Array, "*rows samples"],
    mask: Bool[Array, "*rows samples"],
) -> Float[Array, "*rows"]:
    """Σ M·(−A·log g − (1 − A)·log(1 − g)), least where the prediction g equals A.

    Both logarithms are given: computed from g, the second would be that of 0 as soon as g rounds
    to 1, and every sure prediction equally wrong.

    Args:
        log_reached: log g, of the predicted survival [*rows samples].
        log_missed: log(1 − g) [*rows samples].
        reached: A, measured survival [*rows samples].
        mask: M [*rows samples].

    Returns:
        One sum per row [*rows].

    Source: this module's note on reconstruction.
    """
    # A weight of 0 takes nothing, also of a logarithm that is -inf.
    hit = jnp.where(reached == 0, 0, -reached * log_reached)
    missed = jnp.where(reached == 1, 0, -(1 - reached) * log_missed)
    return jnp.where(mask, hit + missed, 0).sum(axis=-1)


def log_survival(
    log_reached: Float[Array, "*rows samples"],
    log_missed: Float[Array, "*rows samples"],
    c: Float[Array, "*rows samples"],
) -> tuple[Float[Array, "*rows samples"], Float[Array, "*rows samples"]]:
    """One slot further: log g·σ(c) and log(1 − g·σ(c)) from log g and log(1 − g).

    1 − g·σ(c) = (1 − g) + g·(1 − σ(c)), and 1 − σ(c) = σ(−c): no difference of numbers near 1.

    Args:
        log_reached: log g, of the survival before the slot [*rows samples].
        log_missed: log(1 − g) [*rows samples].
        c: the slot's confidence logits, finite [*rows samples].

    Returns:
        Both logarithms after the slot [*rows samples].

    Source: this module's note on reconstruction.
    """
    missed_here = log_reached + jax.nn.log_sigmoid(-c)
    return log_reached + jax.nn.log_sigmoid(c), jnp.logaddexp(log_missed, missed_here)


def fit_temperatures(
    c: Float[Array, "samples γ"],
    accept: Float[Array, "samples γ"],
    mask: Bool[Array, "samples γ"],
    candidates: Float[Array, " candidates"],
) -> Float[Array, " γ"]:
    """Sequential temperature scaling: one temperature per slot position, fitted slot by slot.

    A reconstruction without the paper's text. T_j is the candidate with the least
    `cumulative_cross_entropy` between Π_{k<j} σ(c_k/T_k) · σ(c_j/T_j), with the earlier
    temperatures fixed, and Π_{k≤j} α_k, over the held-out samples with M_j; the first one on
    ties. What is calibrated is therefore the survival, which truncation and `schedule` use, and
    a later slot makes up for what a temperature could not mend before it. From slot 1 on the loss
    is not convex in T, hence a grid and no descent.

    Args:
        c: confidence logits of held-out blocks [samples γ].
        accept: α, or accepted as 0 and 1 [samples γ].
        mask: M; a slot counts only if all before it do [samples γ].
        candidates: temperatures to choose from, finite and > 0 [candidates].

    Returns:
        T [γ].

    Raises:
        ValueError: a candidate is not above 0 or not finite, a slot has no sample, or a slot that
            counts has a confidence that is not finite or an acceptance outside [0, 1].

    Source: issue 3, sequential temperature scaling (reconstructed).
    """
    usable = jnp.isfinite(candidates) & (candidates > 0)
    if candidates.shape[0] == 0 or not bool(usable.all()):
        raise ValueError(
            "candidates: expected at least one temperature, each finite and above 0, got "
            f"{candidates.tolist()}"
        )
    c, accept = _counted_only(c, accept, mask)
    hit, missed = jnp.zeros_like(c[:, 0]), jnp.full_like(c[:, 0], -jnp.inf)
    reached, counted, temperatures = jnp.ones_like(c[:, 0]), jnp.ones_like(mask[:, 0]), []
    for j in range(c.shape[1]):
        counted, reached = counted & mask[:, j], reached * accept[:, j]
        if not bool(counted.any()):
            raise ValueError(
                f"mask: no held-out sample reaches slot {j}; give longer blocks, or fit fewer slots"
            )
        scaled_c = c[:, j][None, :] / candidates[:, None]
        rows = [jnp.broadcast_to(x, scaled_c.shape) for x in (hit, missed, reached, counted)]
        hits, misses = log_survival(rows[0], rows[1], scaled_c)
        best = cumulative_cross_entropy(hits, misses, rows[2], rows[3]).argmin()
        hit, missed = hits[best], misses[best]
        temperatures.append(candidates[best])
    return jnp.stack(temperatures)


def _counted_only(
    c: Float[Array, "samples γ"], accept: Float[Array, "samples γ"], mask: Bool[Array, "samples γ"]
) -> tuple[Float[Array, "samples γ"], Float[Array, "samples γ"]]:
    counts = jnp.cumprod(mask, axis=1).astype(bool)
    c, accept = jnp.where(counts, c, 0), jnp.where(counts, accept, 0)
    if not bool(jnp.isfinite(c).all()):
        raise ValueError(
            "c: expected finite confidence logits wherever mask counts a slot; mask the others"
        )
    if not bool(((accept >= 0) & (accept <= 1)).all()):
        raise ValueError("accept: expected acceptances from 0 to 1 wherever mask counts a slot")
    return c, accept


def _check_survivals(survivals: Float[Array, "requests γ"]) -> None:
    falls = bool((survivals[:, 1:] <= survivals[:, :-1]).all())
    if not falls or not bool(((survivals >= 0) & (survivals <= 1)).all()):
        raise ValueError(
            "survivals: expected probabilities that never ascend along a block (cumulative "
            "products of confidences); pass survival(c), not the confidences themselves"
        )


def _positive_time(step_time: StepTime, tokens: int) -> float | int:
    time = step_time(tokens)
    if not time > 0:
        raise ValueError(f"step_time({tokens}): expected a time above 0, got {time}")
    return time
