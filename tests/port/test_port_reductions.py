"""`row_max`, the products of bf16 factors and the normaliser over some ids, against loops."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_port.objective import products
from torch_port.objective.reductions import row_max
from torch_port.objective.teacher import log_normalizer


def by_loop(row: list[float]) -> tuple[float, int]:
    best = 0
    for place, value in enumerate(row):
        if value > row[best]:
            best = place
    return row[best], best


@settings(max_examples=150)
@given(
    C=st.integers(0, 4),
    K=st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 192, 200, 4097]),
    values=st.sampled_from([(0.0, 1.0), (-math.inf, -3.0), (-1e9, 1e9, math.inf), None]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_maximum_and_its_first_place(C, K, values, dtype, seed) -> None:
    """Ties (few distinct values) go to the lower id; ±∞ and all-equal rows are values like others.

    Faults: the rest after whole segments left out, or winning a tie; a segment's place not added;
    a segment's own tie to the higher id.
    """
    g = torch.Generator().manual_seed(seed)
    if values is None:
        drawn = torch.randn(C, K, generator=g).to(dtype)
    else:
        drawn = torch.tensor(values, dtype=dtype)[
            torch.randint(0, len(values), (C, K), generator=g)
        ]
    top, best = row_max(drawn)
    assert top.dtype == dtype
    assert best.dtype == torch.int64
    want = [by_loop(row) for row in drawn.tolist()]
    assert list(zip(top.tolist(), best.tolist(), strict=True)) == want


@pytest.mark.parametrize(
    ("K", "at"),
    [
        (64, 0),
        (64, 63),
        (65, 64),
        (200, 63),
        (200, 64),
        (200, 127),
        (200, 191),
        (200, 192),
        (200, 199),
    ],
)
def test_one_place_in_a_buffers_rows(K: int, at: int) -> None:
    """Fault: rows of a larger buffer (a view with its stride) read as if they stood alone."""
    whole = torch.zeros(3, K + 7)
    whole[:, K:] = 9.0  # beyond the view
    whole[1, at] = 1.0
    top, best = row_max(whole[:, :K])
    assert top.tolist() == [0, 1, 0]
    assert best.tolist() == [0, at, 0]


@pytest.mark.parametrize("K", [5, 64, 130])
@pytest.mark.parametrize("at", [0, -1])
def test_nan_stays_a_legal_place(K: int, at: int) -> None:
    """A NaN among the logits is the step's error, not an index out of range."""
    row = torch.zeros(1, K)
    row[0, at] = torch.nan
    _, best = row_max(row)
    assert 0 <= best.item() < K


@pytest.mark.parametrize("dtypes", [(16, 16), (32, 16), (32, 32)], ids=str)
@pytest.mark.parametrize("slice_elements", [1, 24, 1 << 20])
def test_product_in_slices(
    monkeypatch: pytest.MonkeyPatch, slice_elements: int, dtypes: tuple[int, int]
) -> None:
    """Against float64 on the rounded factors, into a buffer and without one.

    Faults: a result rounded to bf16 (2⁻⁹ of itself), a slice's columns put elsewhere or left out.
    Sums of 6 products in float32: a few 2⁻²⁴ of the largest, 1e-6 is safe.
    """
    monkeypatch.setattr(products, "SLICE", slice_elements)
    g = torch.Generator().manual_seed(0)
    kinds = {16: torch.bfloat16, 32: torch.float32}
    left, right = (
        torch.randn(rows, 6, generator=g).to(kinds[bits])
        for rows, bits in zip((5, 11), dtypes, strict=True)
    )
    want = torch.tensor([[sum(a * b for a, b in zip(row, column, strict=True))
                          for column in right.tolist()] for row in left.tolist()])  # fmt: skip
    buffer = torch.full((5, 11), torch.nan)
    filled = products.product(left, right, buffer)
    assert filled.data_ptr() == buffer.data_ptr()
    for got in (products.product(left, right), buffer):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6 * want.abs().max().item())


@settings(max_examples=40)
@given(
    ids=st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True),
    rows=st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_normaliser_over_some_ids(ids: list[int], rows: int, seed: int) -> None:
    """Faults: all ids summed, a slice of them left out, head rows taken in the place of ids."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(2, 3, 4, generator=g, dtype=torch.float64)
    head = torch.randn(9, 4, generator=g, dtype=torch.float64)
    got = log_normalizer(states, head, rows, torch.tensor(ids))
    for b, s in itertools.product(range(2), range(3)):
        logits = [float(states[b, s] @ head[i]) for i in ids]
        want = math.log(math.fsum(math.exp(x) for x in logits))
        assert got[b, s].item() == pytest.approx(want, rel=1e-13, abs=1e-13)
