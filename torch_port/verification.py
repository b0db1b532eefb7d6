"""Accepting a prefix of a draft's proposals, with the uniforms given (spec sheet §10).

Shape suffixes: M proposals, V target ids; `…` any leading axes. Temperature 0 is the same code: its
distributions are 1 at the argmax and 0 elsewhere, so that no draw changes what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_port.errors import UserError
from torch_port.models.heads import wide
from torch_port.objective.reductions import row_max


@dataclass(frozen=True)
class Verdict:
    """How many proposals were accepted, and the target id that follows them."""

    accepted: int
    token: int


def distribution(logits: Tensor, temperature: float, whose: str) -> Tensor:
    """Return softmax(logits / temperature) over the last axis, in float32 or better.

    Temperature 0: 1 at the argmax, at the lowest id on ties. −inf is an id of probability 0.

    Arguments: `logits` […, ids]; `whose` logits they are, for the error.
    Raises UserError where a row's largest logit is no finite number: NaN, +inf, or −inf alone.
    """
    logits = wide(logits)
    top = logits.amax(-1, keepdim=True)
    if not bool(torch.isfinite(top).all()):
        raise UserError(
            f"{whose} logits hold NaN or +inf, or no finite value at all; nothing can be drawn "
            "from them: look for an overflow in the model that gave them"
        )
    if temperature == 0:
        best = row_max(logits.reshape(-1, logits.shape[-1]))[1].view(top.shape)
        return torch.zeros_like(logits).scatter(-1, best, 1)
    # Shifted first: divided first, a small temperature overflows.
    return ((logits - top) / temperature).softmax(-1)


def below_one(draws: Tensor, dtype: torch.dtype) -> Tensor:
    """Return draws in `dtype`, still below 1: rounding must not turn a certain acceptance down.

    >>> bool(below_one(torch.tensor(1 - 1e-12, dtype=torch.float64), torch.float32) < 1)
    True
    """
    return draws.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)


def first_exceeding(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return the first id whose cumulative probability, ids ascending, exceeds u, int64 scalar.

    Arguments: `probabilities` [ids], `u` a scalar in [0, 1). An id of probability 0 is never
    returned: where rounding leaves the whole sum at or below u, the last possible id is.

    >>> first_exceeding(torch.tensor([0.25, 0.0, 0.75]), torch.tensor(0.25)).item()
    2
    """
    ids = torch.arange(len(probabilities), device=probabilities.device)
    possible = probabilities > 0
    exceeds = (probabilities.cumsum(-1) > below_one(u, probabilities.dtype)) & possible
    first = torch.where(exceeds, ids, len(ids)).amin()
    return torch.minimum(first, torch.where(possible, ids, -1).amax())


def accepts(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Return u·q < p: accepted with probability min(1, p/q), without a division by 0.

    A token that the target never says is turned down whatever u; one that it says and the draft
    does not (nobody drew it from q) is accepted.
    """
    return below_one(u, q.dtype) * q < p


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """Return max(p − q, 0) over all of V, renormalised: what follows a rejection.

    Pruned ids have q = 0 and keep all of their p. Where nothing is left, p and q differ by rounding
    alone: p itself.
    """
    rest_V = (p_V - q_V).clamp(min=0)
    total = rest_V.sum()
    return torch.where(total > 0, rest_V / total, p_V)


def verify(
    proposals_M: Tensor, q_MV: Tensor, p_V: Tensor, accept_M: Tensor, last: Tensor
) -> Verdict:
    """Accept a prefix of the proposals and draw the token after it.

    The first rejection ends the prefix and is corrected from the residual; after a full accept the
    bonus token is drawn from p.

    Arguments: `proposals_M` target ids; `q_MV` what each was drawn from; `p_V` [M + 1, V], the
    target's distribution at every proposal and after the last; the uniforms of the acceptances and
    of the correction or bonus.
    """
    at = proposals_M.unsqueeze(-1)
    p_M, q_M = p_V[:-1].gather(-1, at).squeeze(-1), q_MV.gather(-1, at).squeeze(-1)
    accepted = int(accepts(p_M, q_M, accept_M).to(torch.int64).cumprod(0).sum())
    after_V = p_V[accepted]
    if accepted < len(proposals_M):
        after_V = residual(after_V, q_MV[accepted])
    return Verdict(accepted, int(first_exceeding(after_V, last)))
