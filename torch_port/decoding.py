"""Speculative decoding of one sequence with given uniforms, plain and uncached (spec sheet §10).

Shape suffixes: T tokens so far, M proposals, F = L·H captured states, V target ids, K draft ids,
R rounds, U = 2n + 1 uniforms of a round. Batches and blocks have one row: [1, 1, …].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from torch_port.blocks import label_offset, make_blocks
from torch_port.config import Settings
from torch_port.errors import NotBuiltError, UserError
from torch_port.models.block_draft import BlockDraft, FrozenTarget
from torch_port.models.heads import wide
from torch_port.verification import below_one, distribution, first_exceeding, verify

# A target: token ids [T] → (logits [T, V], captured states [T, L·H]), a row per token read.
TargetFunction = Callable[[Tensor], tuple[Tensor, Tensor]]


class DecodingConfig(Settings):
    """What a decoding run is asked for. Source: spec sheet §10.

    `proposals` is n, per round; `limit` counts new tokens and cuts the last round; `temperature`
    divides the logits of both sides, 0 is greedy; `end_of_text` ends the sequence where it is
    committed (null: nothing does). `tokenizer_size` is V_tok: the draft proposes no id from there
    up, the target may say any. With `confidence_threshold` only the longest prefix whose Π σ(c)
    stays at or above it is verified.
    """

    proposals: int = Field(ge=1)
    limit: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0)
    end_of_text: int | None = Field(default=None, ge=0)
    tokenizer_size: int | None = Field(default=None, ge=1)
    confidence_threshold: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _divides(self) -> DecodingConfig:
        if 0 < self.temperature < torch.finfo(torch.float32).tiny:
            raise ValueError(
                f"temperature {self.temperature} is 0 in float32; write 0 for greedy decoding"
            )
        return self


@dataclass(frozen=True)
class Proposals:
    """One drafted block: target ids, what each was drawn from, and the confidence logits."""

    ids_M: Tensor
    q_MV: Tensor  # 0 at every id that the draft cannot propose
    confidence_M: Tensor | None


@dataclass(frozen=True)
class Round:
    """What one round verified, accepted and committed, cut where the sequence ended."""

    proposed: int
    accepted: int
    committed: tuple[int, ...]


@dataclass(frozen=True)
class Decoded:
    """Prompt and new tokens, int64 [T], and the rounds that made them."""

    tokens_T: Tensor
    rounds: tuple[Round, ...]


@torch.no_grad()
def draft_block(
    draft: BlockDraft,
    target: FrozenTarget,
    tokens_T: Tensor,
    states_SF: Tensor,
    draws_M: Tensor,
    temperature: float,
    tokenizer_size: int | None = None,
) -> Proposals:
    """Draft a block from the last token, slot by slot, one proposal for each of `draws_M`.

    Each slot's logits read the token before it as a *target* id through the Markov head; a drawn
    draft id goes through the map before it is fed on. The block always has γ slots, whatever M:
    they see each other. In the bonus-anchor layout slot 0 holds the anchor and proposes nothing.

    Arguments: `tokens_T`, anchor last; `states_SF`, captured states from position 0, of which those
    before the anchor are seen; draws in [0, 1).
    Raises UserError for more proposals than the block has, too few states, or a `tokenizer_size`
    that leaves the draft no id.
    """
    _check_proposals(draft, len(draws_M))
    hidden_11MH = _block_states(draft, target, tokens_T, states_SF)[:, :, : len(draws_M)]
    kept_K = draft.kept_target_ids()
    possible_K = kept_K < (draft.vocab_size if tokenizer_size is None else tokenizer_size)
    if not bool(possible_K.any()):
        raise UserError(
            f"tokenizer_size {tokenizer_size} leaves the draft nothing to propose: the lowest of "
            f"its {len(kept_K)} kept ids is {int(kept_K[0])}"
        )
    head_KH = draft.output_head(target.lm_head)
    previous_T = tokens_T[-1:]  # the anchor, then each proposal as a target id
    q_MV = []
    for slot, u in enumerate(draws_M):
        # From slot 0 on every time: the rnn head's state runs along the block.
        e = draft.embed_previous(previous_T.view(1, 1, -1))
        logits_K = draft.logits(hidden_11MH[:, :, : slot + 1], e, head_KH)[0, 0, slot]
        q_K = distribution(
            logits_K.masked_fill(~possible_K, -torch.inf), temperature, "the draft's"
        )
        drawn = draft.to_target_ids(first_exceeding(q_K, u).view(1))
        previous_T = torch.cat([previous_T, drawn])
        q_MV.append(q_K.new_zeros(draft.vocab_size).index_copy(0, kept_K, q_K))
    e = draft.embed_previous(previous_T[:-1].view(1, 1, -1))
    confidence = draft.confidence(hidden_11MH, e, detach=False)
    return Proposals(
        ids_M=previous_T[1:],
        q_MV=torch.stack(q_MV),
        confidence_M=None if confidence is None else confidence[0, 0],
    )


def _block_states(
    draft: BlockDraft, target: FrozenTarget, tokens_T: Tensor, states_SF: Tensor
) -> Tensor:
    """Return h of the slots that propose, [1, 1, predictions, H]; the anchor is the last token."""
    anchor = len(tokens_T) - 1
    if len(states_SF) < anchor:
        raise UserError(
            f"the block's anchor stands at position {anchor}, but only {len(states_SF)} captured "
            "states were given; give those of every token before it"
        )
    anchors_11 = torch.full((1, 1), anchor, device=tokens_T.device)
    keep_11 = torch.ones_like(anchors_11, dtype=torch.bool)
    config = draft.config
    blocks = make_blocks(
        tokens_T[None],
        torch.zeros_like(tokens_T[None], dtype=torch.float32),  # nothing is supervised here
        anchors_11,
        keep_11,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        draft_index_V=draft.draft_vocab_index(),
        block_layout=draft.block_layout,
    )
    # A row for the anchor too, which no slot sees: a prompt of one token has no context at all.
    context_1SF = F.pad(states_SF[:anchor].to(draft.fc.weight.dtype), (0, 0, 0, 1))[None]
    hidden_11GH = draft(blocks, context_1SF, anchors_11, keep_11, target)
    return hidden_11GH[:, :, 1 - label_offset(draft.block_layout) :]


def confident_prefix(confidence_M: Tensor, threshold: float) -> int:
    """Return the length of the longest prefix whose Π σ(c) stays at or above the threshold.

    A slot's confidence reads the tokens before it and not its own, so truncating leaves the output
    distribution the target's.

    >>> confident_prefix(torch.tensor([0.0, 0.0, 9.0]), 0.25)
    2
    """
    return int((wide(confidence_M).sigmoid().cumprod(0) >= threshold).sum())


@torch.no_grad()
def speculate(
    call: TargetFunction,
    draft: BlockDraft,
    target: FrozenTarget,
    prompt_T: Tensor | Sequence[int],
    config: DecodingConfig,
    draws_RU: Tensor | None = None,
) -> Decoded:
    """Decode until `limit` new tokens are made or the end of text is committed.

    Arguments: `call`, the target to follow; `draft` and the embedding and head that it borrows;
    `prompt_T`, at least one id; `draws_RU`, a row of 2n + 1 uniforms for each round: n proposals,
    n acceptances, then the correction or bonus. Places never move: what a truncated round does not
    use is skipped. `limit` rows always suffice; greedy decoding needs none.
    Returns the tokens and the rounds. Their distribution is that of the target's own decoding.
    Raises UserError, naming the setting, for what does not fit together.
    """
    _check_settings(draft, config)
    device, V = draft.vocab_device, draft.vocab_size
    tokens_T = _checked_prompt(prompt_T, V).to(device)
    draws_RU = _checked_draws(
        draws_RU, config, torch.promote_types(draft.fc.weight.dtype, torch.float32)
    ).to(device)
    end = len(tokens_T) + config.limit
    _, known_SF = _ask(call, tokens_T, draft)
    rounds: list[Round] = []
    while len(tokens_T) < end and not (rounds and config.end_of_text in rounds[-1].committed):
        if len(rounds) == len(draws_RU):
            raise UserError(
                f"draws hold {len(draws_RU)} rows, one for each round, but the sequence goes on "
                f"after as many; give {config.limit} rows (limit)"
            )
        done, known_SF = _round(
            call, draft, target, tokens_T, known_SF, config, draws_RU[len(rounds)]
        )
        rounds.append(_cut(done, end - len(tokens_T), config.end_of_text))
        tokens_T = torch.cat([tokens_T, tokens_T.new_tensor(rounds[-1].committed)])
    return Decoded(tokens_T, tuple(rounds))


def _round(
    call: TargetFunction,
    draft: BlockDraft,
    target: FrozenTarget,
    tokens_T: Tensor,
    known_SF: Tensor,
    config: DecodingConfig,
    draws_U: Tensor,
) -> tuple[Round, Tensor]:
    """Draft, truncate, verify. Returns the round and the states of what the target has read."""
    n = config.proposals
    drafted = draft_block(
        draft, target, tokens_T, known_SF, draws_U[:n], config.temperature, config.tokenizer_size
    )
    verified = n
    if config.confidence_threshold is not None:
        assert drafted.confidence_M is not None  # _check_settings
        verified = confident_prefix(drafted.confidence_M, config.confidence_threshold)
    ids_M = drafted.ids_M[:verified]
    logits_TV, states_TF = _ask(call, torch.cat([tokens_T, ids_M]), draft)
    p_V = distribution(logits_TV[len(tokens_T) - 1 :], config.temperature, "the target's")
    verdict = verify(ids_M, drafted.q_MV[:verified], p_V, draws_U[n : n + verified], draws_U[2 * n])
    committed = (*ids_M[: verdict.accepted].tolist(), verdict.token)
    return Round(verified, verdict.accepted, committed), states_TF


def _cut(done: Round, remaining: int, end_of_text: int | None) -> Round:
    """Cut a round after the limit or the first end of text; its statistics with it."""
    kept = done.committed[:remaining]
    if end_of_text in kept:
        kept = kept[: kept.index(end_of_text) + 1]
    if len(kept) == len(done.committed):
        return done
    return Round(min(done.proposed, len(kept)), min(done.accepted, len(kept)), kept)


def _ask(call: TargetFunction, tokens_T: Tensor, draft: BlockDraft) -> tuple[Tensor, Tensor]:
    """Return the target's logits and states, of the shapes that the draft was built for."""
    logits_TV, states_TF = call(tokens_T)
    for name, tensor, width in (
        ("logits", logits_TV, draft.vocab_size),
        ("states", states_TF, draft.fc.in_features),
    ):
        if tensor.shape != (len(tokens_T), width):
            raise UserError(
                f"the target gave {name} {list(tensor.shape)} for {len(tokens_T)} tokens; this "
                f"draft reads [{len(tokens_T)}, {width}], a row per token: is it another target's?"
            )
    return logits_TV, states_TF


def _check_proposals(draft: BlockDraft, proposals: int) -> None:
    if not isinstance(draft, BlockDraft):
        raise NotBuiltError(
            f"decoding with {type(draft).__name__} is not built; DSpark and DFlash drafts decode"
        )
    if not 1 <= proposals <= draft.config.predictions:
        raise UserError(
            f"proposals is {proposals}, but a {draft.algorithm} draft of block_size "
            f"{draft.config.block_size} makes 1 to {draft.config.predictions} per round"
        )


def _check_settings(draft: BlockDraft, config: DecodingConfig) -> None:
    _check_proposals(draft, config.proposals)
    V = draft.vocab_size
    if config.end_of_text is not None and config.end_of_text >= V:
        raise UserError(f"end_of_text {config.end_of_text} is no id of the {V}-row target")
    if config.tokenizer_size is not None and config.tokenizer_size > V:
        raise UserError(
            f"tokenizer_size {config.tokenizer_size} is more than the target's {V} rows; give the "
            "number of ids that the tokenizer can produce"
        )
    if config.confidence_threshold is not None and draft.confidence_head is None:
        raise UserError(
            f"confidence_threshold is {config.confidence_threshold}, but this draft has no "
            "confidence head; leave it out (null)"
        )


def _checked_prompt(prompt_T: Tensor | Sequence[int], vocab_size: int) -> Tensor:
    ids_T = torch.as_tensor(prompt_T)
    if ids_T.dim() != 1 or len(ids_T) == 0 or ids_T.is_floating_point():
        raise UserError(
            f"the prompt must be a row of at least one token id, not {ids_T.dtype} of shape "
            f"{list(ids_T.shape)}"
        )
    odd = [x for x in ids_T.tolist() if not 0 <= x < vocab_size]
    if odd:
        raise UserError(f"the prompt holds id {odd[0]}, no id of the {vocab_size}-row target")
    return ids_T.to(torch.int64)


def _checked_draws(draws_RU: Tensor | None, config: DecodingConfig, dtype: torch.dtype) -> Tensor:
    """Return the uniforms in `dtype`; zeros for greedy decoding, which no draw changes."""
    width = 2 * config.proposals + 1
    if draws_RU is None:
        if config.temperature > 0:
            raise UserError(
                f"temperature {config.temperature} needs draws: uniforms [{config.limit}, {width}]"
            )
        return torch.zeros(config.limit, width, dtype=dtype)
    if draws_RU.dim() != 2 or draws_RU.shape[1] != width or not draws_RU.is_floating_point():
        raise UserError(
            f"draws must be floating numbers [rounds, {width}] (2 · proposals + 1), not "
            f"{draws_RU.dtype} of shape {list(draws_RU.shape)}"
        )
    if not bool(((draws_RU >= 0) & (draws_RU < 1)).all()):
        raise UserError("draws must lie in [0, 1): 1 itself, NaN and others are no uniforms")
    return below_one(draws_RU, dtype)
