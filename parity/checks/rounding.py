"""What the port computes in float32 and rounds once, piece by piece (sheet §11).

Given bf16 inputs, a value that was computed in float32 is off by half a unit in the last place of
bf16 when it is rounded at the end, and by float32's rounding when it is not. A step that is done in
bf16 on the way adds a rounding of its own, which the whole draft's tolerance cannot show.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parity.cases import Array
from parity.checks.base import Measured

NAME = "precision"
ROUNDING_RUN = "rounded once"
# Eight bits: half a unit in the last place is at most 2⁻⁸ of an element; float32's own on top.
_ONCE = 1.01 * 2.0**-8
# float32: 6e-8 an operation, sums of up to 4096 elements, an exponential of numbers up to 30.
_FLOAT32 = 2e-5


def compare_rounding(seed: int) -> list[Measured]:
    """Compare pieces of the port on bf16 inputs with float64 on the same."""
    import torch

    from torch_port.device import rms_norm
    from torch_port.models.heads import lookup
    from torch_port.objective.products import product
    from torch_port.objective.teacher import log_normalizer

    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, size: float = 1.0) -> Any:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * size
        return values.to(torch.bfloat16)

    x, weight = drawn(64, 512), drawn(512)
    square = x.double().square().mean(-1, keepdim=True)
    normed = x.double() * torch.rsqrt(square + 1e-6) * weight.double()
    states, head = drawn(32, 64), drawn(300, 64, size=0.6)
    logits = states.double() @ head.double().T
    table = drawn(5, 8).requires_grad_()
    table.grad_dtype = torch.float32
    index = torch.zeros(1000, dtype=torch.int64)
    share = drawn(1000, 8)
    torch.autograd.backward(lookup(table, index), share)
    assert table.grad is not None
    return [
        _each("RMSNorm", rms_norm(x, weight, 1e-6), normed, _ONCE),
        _whole("a product of bf16 factors", product(states, head), logits),
        # 7 rows at a time: the running maximum moves.
        _whole("the normaliser", log_normalizer(states, head, 7), logits.logsumexp(-1)),
        _whole("the gradient of a W1 row read 1000 times", table.grad[0], share.double().sum(0)),
        *_rotary(),
        *_attention(drawn),
    ]


def _rotary() -> list[Measured]:
    """bf16 tables at the positions of long samples: angles of thousands must not be rounded."""
    import torch

    from torch_port.models.attention import rotary_tables

    S, D, theta = 4096, 64, 1e4
    tables = rotary_tables(S, D, theta, torch.bfloat16, torch.device("cpu"))
    half = np.outer(np.arange(S), 1 / theta ** (np.arange(0, D, 2) / D))
    angle = np.concatenate([half, half], axis=1)
    # Numbers below 1 have a unit in the last place of 2⁻⁸, and are off by half of it.
    return [
        Measured(NAME, what, float(np.abs(_array(table) - exact).max()), 1.01 * 2.0**-9)
        for what, table, exact in zip(
            ("rotary cosines", "rotary sines"), tables, (np.cos(angle), np.sin(angle)), strict=True
        )
    ]


def _attention(drawn: Any) -> list[Measured]:
    """Blockwise attention of one block on given queries, keys and values."""
    import torch

    from torch_port.layout import lay_out
    from torch_port.models.blockwise import blockwise_attention

    S, G, D, anchor = 12, 4, 16, 9
    # Scores of about 16, which bf16 rounds by up to 1/16: every share would be off by per cents.
    q, own_k, k = (drawn(1, n, s, D, size=0.5) + 2 for n, s in ((2, G), (1, G), (1, S)))
    own_v, v = drawn(1, 1, G, D), drawn(1, 1, S, D)
    anchors, keep = torch.full((1, 1), anchor), torch.ones(1, 1, dtype=torch.bool)
    layout = lay_out(torch.ones(1, S), anchors, keep, G)
    got = blockwise_attention(q, (k, v), (own_k, own_v), layout, None)
    keys, values = (
        torch.cat([a[:, :, :anchor], b], 2).double() for a, b in ((k, own_k), (v, own_v))
    )
    expected = (q.double() @ keys.mT * D**-0.5).softmax(-1) @ values
    # Sums of values of either sign: of the largest value, not of each.
    error = float((got.double() - expected).abs().max() / expected.abs().max())
    return [Measured(NAME, "blockwise attention", error, _ONCE)]


def _each(what: str, got: Any, expected: Any, allowed: float) -> Measured:
    """Compare with each element's own size."""
    a, b = _array(got), _array(expected)
    return Measured(NAME, what, float((np.abs(a - b) / np.abs(b)).max()), allowed)


def _whole(what: str, got: Any, expected: Any) -> Measured:
    a, b = _array(got), _array(expected)
    return Measured(NAME, what, float(np.abs(a - b).max() / np.abs(b).max()), _FLOAT32)


def _array(values: Any) -> Array:
    array: Array = values.detach().double().numpy()
    return array
