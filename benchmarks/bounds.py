"""The bound: the matrix products that no form of the step can do without, and nothing else.

Each product runs through `torch.mm` or `torch.bmm` into an output allocated beforehand; no
softmax, no mask, no gather. They are listed with their sizes, so that a reader can see what was
left out and what was counted once per sequence position instead of once per slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import AttentionShape, ObjectiveShape, StepShape


@dataclass(frozen=True)
class Product:
    """`count` products of [m, k] by [k, n]; a mean size where they differ."""

    name: str
    m: float
    k: float
    n: float
    count: int
    flop: float  # all `count` together, 2·m·k·n each


class Products:
    """A list of products, and the calls that run them."""

    def __init__(self) -> None:
        self.listed: list[Product] = []
        self._calls: list[tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]] = []
        self._generator = torch.Generator().manual_seed(0)

    def operand(self, *size: int) -> Tensor:
        """Make a random operand."""
        return torch.randn(*size, generator=self._generator)

    def mm(self, name: str, a: Tensor, b: Tensor, count: int = 1) -> Tensor:
        """Add `count` products a·b; returns their (one) output."""
        (m, k), n = a.shape, b.shape[1]
        out = torch.empty(m, n)
        self.listed.append(Product(name, m, k, n, count, 2.0 * m * k * n * count))
        self._calls.extend([(torch.mm, a, b, out)] * count)
        return out

    def bmm(self, name: str, triples: list[tuple[Tensor, Tensor, Tensor]], times: int = 1) -> None:
        """Add batched products (a, b, out) as one line, the whole of it `times` times."""
        count = sum(len(a) for a, _, _ in triples)
        flop = sum(2.0 * a.numel() * b.shape[2] for a, b, _ in triples)
        # Means over the products: blocks see different numbers of keys.
        m = sum(len(a) * a.shape[1] for a, _, _ in triples) / count
        k = sum(len(a) * a.shape[2] for a, _, _ in triples) / count
        n = sum(len(a) * b.shape[2] for a, b, _ in triples) / count
        self.listed.append(Product(name, m, k, n, count * times, flop * times))
        self._calls.extend([(torch.bmm, *triple) for triple in triples] * times)

    @torch.no_grad()
    def run(self) -> None:
        """Run every product once."""
        for operation, a, b, out in self._calls:
            operation(a, b, out=out)


def objective_products(
    shape: ObjectiveShape, slots: int, positions: int, *, normaliser: bool
) -> Products:
    """List the objective's products: M evaluated slots, P covered positions.

    The frozen head takes no gradient; with `normaliser` the pruned rows' logits are made, once per
    covered position (the kept rows' are there already).
    """
    products = Products()
    add_objective(products, shape, slots, positions, normaliser=normaliser)
    return products


def add_objective(
    products: Products, shape: ObjectiveShape, slots: int, positions: int, *, normaliser: bool
) -> None:
    """Add the objective's products to a list."""
    H, K, V, r = shape.hidden, shape.draft_vocab, shape.vocab, shape.rank
    operand = products.operand
    head_KH, w2_Kr = operand(K, H), operand(K, r)
    h_MH, states_PH, e_Pr = operand(slots, H), operand(positions, H), operand(positions, r)
    logits_MK = products.mm("draft logits h·U_Kᵀ, per slot", h_MH, head_KH.T)
    products.mm("dh = dz·U_K, per slot", logits_MK, head_KH)
    products.mm("teacher logits T·U_Kᵀ, per position", states_PH, head_KH.T)
    bias_PK = products.mm("Markov bias e·W2ᵀ, per position", e_Pr, w2_Kr.T)
    products.mm("dW2 = dzᵀ·e, per position", bias_PK.T, e_Pr)
    products.mm("de = dz·W2, per position", bias_PK, w2_Kr)
    if normaliser:
        rest = operand(V - K, H)
        products.mm("teacher logits of the pruned rows, per position", states_PH, rest.T)


def attention_products(shape: AttentionShape, anchors: list[int]) -> Products:
    """List attention's seven products per block, over the keys that the block can see."""
    products = Products()
    add_attention(products, shape, anchors, layers=1)
    return products


def add_attention(
    products: Products, shape: AttentionShape, anchors: list[int], *, layers: int
) -> None:
    """Add attention's products to a list, for full-attention `layers`.

    Query heads that read one kv head are folded into its rows: kv heads of batch, heads/kv·γ rows,
    a + γ keys.
    """
    R, D, G = shape.kv_heads, shape.head_dim, shape.block
    rows = shape.heads // R * G
    widest = max(anchors) + G
    q, out = products.operand(R, rows, D), products.operand(R, rows, D)
    keys, values = products.operand(R, widest, D), products.operand(R, widest, D)
    scores, d_keys = torch.empty(R * rows * widest), torch.empty(R * widest * D)
    scores.normal_(generator=torch.Generator().manual_seed(1))
    d_scores = scores.clone()
    visible = [anchor + G for anchor in anchors]

    def wide(buffer: Tensor, width: int) -> Tensor:
        return buffer[: R * rows * width].view(R, rows, width)

    def tall(width: int) -> Tensor:
        return d_keys[: R * width * D].view(R, width, D)

    def add(name: str, triple: Callable[[int], tuple[Tensor, Tensor, Tensor]]) -> None:
        products.bmm(name, [triple(width) for width in visible], layers)

    for name in ("scores Q·Kᵀ", "scores again, in backward"):
        add(name, lambda w: (q, keys[:, :w].transpose(1, 2), wide(scores, w)))
    add("output P·V", lambda w: (wide(scores, w), values[:, :w], out))
    add("dV = Pᵀ·dO", lambda w: (wide(scores, w).transpose(1, 2), q, tall(w)))
    add("dP = dO·Vᵀ", lambda w: (q, values[:, :w].transpose(1, 2), wide(d_scores, w)))
    add("dQ = dS·K", lambda w: (wide(d_scores, w), keys[:, :w], out))
    add("dK = dSᵀ·Q", lambda w: (wide(d_scores, w).transpose(1, 2), q, tall(w)))


def step_products(shape: StepShape, slots: int, positions: int, anchors: list[int]) -> Products:
    """List the whole step's products: attention, objective, and the backbone's linear layers.

    Every linear layer takes three products: forward, input gradient, weight gradient; the captured
    states are frozen, so `fc` takes no input gradient.
    """
    products = Products()
    add_attention(products, shape.attention, anchors, layers=shape.layers)
    prunes = shape.objective.draft_vocab < shape.objective.vocab
    add_objective(products, shape.objective, slots, positions, normaliser=prunes)
    H, S, Q = shape.objective.hidden, shape.attention.sequence, len(anchors) * shape.attention.block
    wide = shape.attention.heads * shape.attention.head_dim
    narrow = shape.attention.kv_heads * shape.attention.head_dim
    _linear(products, "fc", S, shape.captured * H, H, 1, input_gradient=False)
    for name, rows, inner, outer, count in (
        ("q_proj", Q, H, wide, 1),
        ("k_proj, v_proj", S + Q, H, narrow, 2),
        ("o_proj", Q, wide, H, 1),
        ("gate_proj, up_proj", Q, H, shape.intermediate, 2),
        ("down_proj", Q, shape.intermediate, H, 1),
    ):
        _linear(products, name, rows, inner, outer, count * shape.layers)
    return products


def _linear(
    products: Products,
    name: str,
    rows: int,
    inner: int,
    outer: int,
    count: int,
    *,
    input_gradient: bool = True,
) -> None:
    x, weight = products.operand(rows, inner), products.operand(outer, inner)
    y = products.mm(f"{name}: y = x·Wᵀ", x, weight.T, count)
    if input_gradient:
        products.mm(f"{name}: dx = dy·W", y, weight, count)
    products.mm(f"{name}: dW = dyᵀ·x", y.T, x, count)
