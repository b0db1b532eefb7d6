"""Accepting, correcting and drawing with given uniforms: hand-computed values (§10)."""

import math

import pytest
import torch
from decoding_toys import row

from torch_port.decoding import confident_prefix
from torch_port.verification import accepts, distribution, first_exceeding, residual, verify

BELOW_ONE = 1 - 2**-53
# Sums and products of at most 4 numbers of magnitude 1 in float64: a few 1e-16.
ROUNDING = 1e-14


def u(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


P = torch.stack([row(0.1, 0.2, 0.3, 0.4), row(0.4, 0.3, 0.2, 0.1), row(0.0, 0.5, 0.5, 0.0)])
Q = torch.stack([row(0.0, 0.6, 0.0, 0.4), row(0.0, 0.2, 0.0, 0.8)])  # pruned: ids 1 and 3 are kept


@pytest.mark.parametrize(
    ("proposals", "accept", "last", "accepted", "token"),
    [
        # Slot 0: id 1 is accepted below 0.2/0.6; else max(p − q, 0) = (0.1, 0, 0.3, 0), over 0.4.
        ((1, 1), (0.34, 0.0), 0.2, 0, 0),
        ((1, 1), (0.34, 0.0), 0.25, 0, 2),
        ((1, 1), (0.34, 0.0), 0.99, 0, 2),
        # Slot 1: id 3 is accepted below 0.1/0.8; else (0.4, 0.1, 0.2, 0) over 0.7.
        ((1, 3), (0.33, 0.13), 0.57, 1, 0),
        ((1, 3), (0.33, 0.13), 0.58, 1, 1),
        ((1, 3), (0.33, 0.13), 0.72, 1, 2),
        # Both accepted: the bonus is drawn from p itself.
        ((1, 3), (0.33, 0.12), 0.49, 2, 1),
        ((1, 1), (0.33, 0.99), 0.5, 2, 2),
        # An acceptance after a rejection counts for nothing.
        ((1, 1), (0.34, 0.0), 0.0, 0, 0),
    ],
)
def test_a_prefix_is_accepted_and_corrected(proposals, accept, last, accepted, token) -> None:
    """Faults: a residual not renormalised, over the kept ids alone, of another slot, or of p.

    And: acceptances counted past a rejection; the bonus from the last proposal's own p.
    """
    verdict = verify(torch.tensor(proposals), Q, P, row(*accept), u(last))
    assert (verdict.accepted, verdict.token) == (accepted, token)


def test_nothing_to_verify_leaves_a_draw_from_the_target() -> None:
    """Fault: a round that was truncated to no proposal breaks off, or corrects what nobody drew."""
    nothing = torch.tensor([], dtype=torch.int64)
    verdict = verify(nothing, Q[:0], P[:1], row(), u(0.35))
    assert (verdict.accepted, verdict.token) == (0, 2)


def test_probabilities_of_zero() -> None:
    """Faults: a token that the target never says accepted at u = 0; a certain one turned down."""
    p, q, draw = row(0.0, 0.5, 0.0, 0.25, 0.3), row(0.5, 0.0, 0.0, 0.25, 0.2), torch.zeros(5)
    assert accepts(p, q, draw.double()).tolist() == [False, True, False, True, True]
    highest = torch.full((5,), BELOW_ONE, dtype=torch.float64)
    assert accepts(p, q, highest).tolist() == [False, True, False, True, True]


def test_equal_probabilities_are_always_accepted_in_float32() -> None:
    """Fault: a uniform of float64 just below 1 becomes 1 in float32 and turns a certainty down."""
    half = torch.tensor([0.5])
    assert accepts(half, half, torch.tensor([BELOW_ONE], dtype=torch.float64)).tolist() == [True]
    assert first_exceeding(half.new_tensor([0.5, 0.5]), u(BELOW_ONE)) == 1


def test_an_empty_residual_is_the_target() -> None:
    """Fault: 0/0 where p and q differ by rounding, so that any id comes out."""
    assert residual(P[0], P[0]).tolist() == P[0].tolist()
    assert residual(P[0] * (1 - 1e-16), P[0] * (1 + 1e-15)).isfinite().all()


@pytest.mark.parametrize(
    ("probabilities", "draw", "first"),
    [
        ((0.25, 0.0, 0.75), 0.0, 0),
        ((0.25, 0.0, 0.75), 0.2499, 0),
        ((0.25, 0.0, 0.75), 0.25, 2),  # exceeds, not reaches
        ((0.0, 0.5, 0.5), 0.0, 1),
        ((0.25, 0.5, 0.0), 0.9, 1),  # a sum short of u: the last possible id
    ],
)
def test_the_first_id_whose_cumulative_probability_exceeds(probabilities, draw, first) -> None:
    """Faults: ≥ in place of >; an id of probability 0 drawn; an id past the last."""
    assert first_exceeding(row(*probabilities), u(draw)) == first


def test_temperature_divides_the_logits() -> None:
    """Faults: a multiplied temperature; overflow of a small one; ties to the higher id."""
    logits = row(0.0, 2 * math.log(3), -math.inf)
    assert distribution(logits, 2.0, "").tolist() == pytest.approx([0.25, 0.75, 0], abs=ROUNDING)
    assert distribution(logits, 1.0, "").tolist() == pytest.approx([0.1, 0.9, 0], abs=ROUNDING)
    assert distribution(row(1e9, 1e9, 0).float(), 1e-30, "").tolist() == [0.5, 0.5, 0.0]
    tied = torch.zeros(2, 100)
    tied[1, [70, 99]] = 3.0
    assert distribution(tied, 0.0, "").argmax(-1).tolist() == [0, 70]
    assert distribution(tied, 0.0, "").sum(-1).tolist() == [1, 1]


def test_confident_prefix_by_hand() -> None:
    """Faults: a slot's own σ(c) compared; > in place of ≥; slots counted past the first below."""
    assert confident_prefix(row(0.0, 0.0, 0.0), 0.25) == 2  # products 1/2, 1/4, 1/8
    assert confident_prefix(row(0.0, 0.0, 0.0), 0.26) == 1
    assert confident_prefix(row(-1.0, 9.0, 9.0), 0.5) == 0
    assert confident_prefix(row(0.0, 0.0), 0.0) == 2
