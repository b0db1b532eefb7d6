"""Markov and confidence heads (spec sheet §6, paper Eq. 5 to 7).

Shape suffixes: G slots of a block, V target ids, K draft ids, H hidden size, r Markov rank; `…` any
leading axes. Every head type ends in W2: bias = code · W2ᵀ, with a code of width r of its own.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torch_port.config import DraftConfig


def wide(values: Tensor) -> Tensor:
    """Return values in float32 or better, the dtype of logits and of all that follows (§11)."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """Return table[index], […, r]; a row's gradients are summed in float32 or better.

    torch sums them in the table's own dtype, one after another: in bf16 a token that occurred 1000
    times in a batch got half of its gradient (docs/precision.md).
    """
    return _Lookup.apply(table, index)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(table)
        return F.embedding(index, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        # Left wide: autograd casts it to the dtype in which the table's gradient is kept.
        summed = torch.ops.aten.embedding_dense_backward(wide(grad), index, ctx.rows, -1, False)
        return summed, None


class TokenEmbedding(nn.Embedding):
    """An embedding whose gradient is summed in float32 or better (`lookup`)."""

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows at `index`, […, r]."""
        return lookup(self.weight, index)


class MarkovHead(nn.Module):
    """Vanilla: code = W1[previous]. W1 is [V, r], read with *target* ids; W2 is [K, r]."""

    # What a slot's code depends on: its previous token alone ("position": slots of different blocks
    # that stand at one position share it), the slot's own state, or the block up to the slot.
    scope: Literal["position", "slot", "block"] = "position"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.markov_w1 = TokenEmbedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """Return e = W1[previous target id], […, G, r]."""
        return self.markov_w1(previous)

    def code(self, hidden: Tensor, e: Tensor) -> Tensor:
        """Return what W2 turns into the bias, […, G, r]."""
        return e

    def bias(self, hidden: Tensor, e: Tensor) -> Tensor:
        """Return the logit bias, […, G, K], in float32 or better."""
        return F.linear(wide(self.code(hidden, e)), wide(self.markov_w2.weight))


class GatedMarkovHead(MarkovHead):
    """Gated: code = σ(Wg·[h; e] + bg) ⊙ e."""

    scope = "slot"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        r = config.markov_rank
        self.gate_proj = nn.Linear(config.hidden_size + r, r)

    def code(self, hidden: Tensor, e: Tensor) -> Tensor:
        """Return the gated embedding, […, G, r]."""
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, e], dim=-1))) * e


class RecurrentMarkovHead(MarkovHead):
    """Recurrent along the block: a gated state s, s₀ = 0, and code = tanh(o).

    [g; c; o] = Wj·[s; e; h] + bj; s ← σ(g)⊙s + (1 − σ(g))⊙tanh(c). Written out: no GRU kernel.
    """

    scope = "block"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        r = config.markov_rank
        self.joint_proj = nn.Linear(2 * r + config.hidden_size, 3 * r)

    def code(self, hidden: Tensor, e: Tensor) -> Tensor:
        """Return tanh(o) of each slot, […, G, r]."""
        state = torch.zeros_like(e[..., 0, :])
        codes = []
        for slot in range(e.shape[-2]):
            joint = torch.cat([state, e[..., slot, :], hidden[..., slot, :]], dim=-1)
            gate, candidate, output = self.joint_proj(joint).chunk(3, dim=-1)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            codes.append(torch.tanh(output))
        return torch.stack(codes, dim=-2)


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


class ConfidenceHead(nn.Module):
    """One linear unit on [h; e], or on h alone; gives a logit."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, e: Tensor | None) -> Tensor:
        """Return the confidence logit of each slot, […, G]."""
        if self.with_markov:
            assert e is not None  # the config refuses with_markov without a Markov head
            hidden = torch.cat([hidden, e], dim=-1)
        return self.proj(hidden).squeeze(-1)
