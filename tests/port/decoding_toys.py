"""Drafts and targets to decode by hand with, and the measure of what uniforms do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from toys import H, config

from torch_port.decoding import DecodingConfig, TargetFunction, confident_prefix, draft_block
from torch_port.models.block_draft import BlockDraft, FrozenTarget
from torch_port.models.dflash import DFlashDraft
from torch_port.models.dspark import DSparkDraft
from torch_port.verification import distribution, verify
from torch_port.vocabulary.mapping import buffers_from_kept

DFLASH: dict[str, Any] = {
    "projector_type": "dflash",
    "architectures": ["DFlashDraftModel"],
    "markov_rank": 0,
    "markov_head_type": "none",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn_draft(kept: Sequence[int], vocab_size: int, seed: int = 0, **changes: Any) -> BlockDraft:
    """A float64 draft of drawn weights, large enough that every path matters."""
    made = config(vocab_size=vocab_size, draft_vocab_size=len(kept), **changes)
    draft = (DFlashDraft if made.projector_type == "dflash" else DSparkDraft)(made).double()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(0, 0.5, generator=random)
    if draft.prunes_vocabulary:
        draft.install_vocab_mapping(*buffers_from_kept(torch.tensor(kept), vocab_size))
    return draft


def frozen(vocab_size: int, seed: int = 1) -> FrozenTarget:
    random = torch.Generator().manual_seed(seed)
    shape = vocab_size, H
    return FrozenTarget(
        torch.randn(shape, generator=random, dtype=torch.float64),
        torch.randn(shape, generator=random, dtype=torch.float64),
    )


def table_draft(
    table: dict[int, Sequence[float]], kept: Sequence[int], vocab_size: int, **changes: Any
) -> tuple[BlockDraft, FrozenTarget]:
    """A draft whose logits are a table's alone: of the kept ids, by the token before them.

    W1 is the identity, W2 the table (tokens without a row have logits of 0), the target's head 0.
    """
    draft = drawn_draft(kept, vocab_size, markov_rank=vocab_size, **changes)
    assert draft.markov_head is not None
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(torch.eye(vocab_size))
        weight = draft.markov_head.markov_w2.weight.zero_()
        for token, logits in table.items():
            weight[:, token] = row(*logits)
    head = torch.zeros(vocab_size, H, dtype=torch.float64)
    return draft, FrozenTarget(torch.ones_like(head), head)


def table_target(logits_VV: Tensor) -> TargetFunction:
    """A target that looks at the last token alone."""
    return lambda tokens: (logits_VV[tokens], logits_VV.new_zeros(len(tokens), 2 * H))


def reading_target(vocab_size: int, seed: int = 5) -> TargetFunction:
    """A causal target whose logits and states depend on every token read so far."""
    random = torch.Generator().manual_seed(seed)
    embedding, head = (
        torch.randn(shape, generator=random, dtype=torch.float64)
        for shape in ((vocab_size, 2 * H), (2 * H, vocab_size))
    )

    def call(tokens: Tensor) -> tuple[Tensor, Tensor]:
        age = torch.arange(1, len(tokens) + 1, dtype=torch.float64).unsqueeze(-1)
        states = torch.sin((embedding[tokens] * age).cumsum(0))
        return 0.5 * states @ head, states

    return call


def cells(decide: Callable[[float], int]) -> Iterator[tuple[int, float, float]]:
    """Yield (outcome, share of [0, 1), a draw inside) of a decision: each outcome is an interval.

    Boundaries are found by bisection, to the last bit, from what the code does alone.
    """
    low, last = 0.0, decide(1 - 2**-53)
    while True:
        outcome = decide(low)
        inside, outside = low, 1.0
        while outcome != last and inside < (middle := (inside + outside) / 2) < outside:
            inside, outside = (middle, outside) if decide(middle) == outcome else (inside, middle)
        yield outcome, outside - low, (low + outside) / 2
        if outcome == last:
            return
        low = outside


def round_paths(
    call: TargetFunction,
    draft: BlockDraft,
    target: FrozenTarget,
    tokens: Tensor,
    asked: DecodingConfig,
) -> Iterator[tuple[float, list[float], tuple[int, ...]]]:
    """Yield (probability, draws, committed tokens) of every path of one round."""
    n, states = asked.proposals, call(tokens)[1]

    def block(draws: list[float]) -> Any:
        return draft_block(
            draft, target, tokens, states, row(*draws), asked.temperature, asked.tokenizer_size
        )

    def proposals(weight: float, draws: list[float]) -> Iterator[tuple[float, list[float]]]:
        if len(draws) == n:
            yield weight, draws
            return
        for _, share, u in cells(lambda u: int(block([*draws, u]).ids_M[-1])):
            yield from proposals(weight * share, [*draws, u])

    for weight, draws in proposals(1.0, []):
        drafted, m = block(draws), n
        if asked.confidence_threshold is not None:
            m = confident_prefix(drafted.confidence_M, asked.confidence_threshold)
        ids, q = drafted.ids_M[:m], drafted.q_MV[:m]
        logits = call(torch.cat([tokens, ids]))[0][len(tokens) - 1 :]
        p = distribution(logits, asked.temperature, "the target's")

        def judged(accept: list[float], last: float, ids=ids, q=q, p=p, m=m) -> Any:
            padded = (accept + [0.5] * m)[:m]
            return verify(ids, q, p, row(*padded), torch.tensor(last, dtype=torch.float64))

        def verdicts(weight: float, accept: list[float], judged=judged, m=m) -> Iterator[Any]:
            j = len(accept)
            if j < m:
                for yes, share, u in cells(lambda u: judged([*accept, u], 0.5).accepted > j):
                    if yes:
                        yield from verdicts(weight * share, [*accept, u])
                    else:
                        yield weight * share, [*accept, u]
            else:
                yield weight, accept

        for reached, accept in verdicts(weight, []):
            for token, share, u in cells(lambda u, accept=accept: judged(accept, u).token):
                padded = (accept + [0.5] * n)[:n]
                accepted = judged(accept, u).accepted
                committed = (*ids[:accepted].tolist(), token)
                yield reached * share, [*draws, *padded, u], committed
