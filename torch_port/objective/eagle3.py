"""EAGLE3's objective: soft cross entropy over training-time-test steps (spec sheet §13).

The teacher stands still while the steps shift: step i's index t is taught at position p = t + 1 + i
and labelled by x[p + 1]. So everything here is laid out by p: each position's teacher is made once
for all steps, for a few positions at a time under activation checkpointing, and nothing K-wide
outlives its chunk. Over all of V only an argmax and a normaliser exist, read slice by slice.

Shape suffixes: B batch, S sequence, P = S − 2 teacher positions 1 … S − 2, J steps, C positions of
a chunk (any row), K draft ids, V target ids, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_port.config_eagle3 import Eagle3Objective
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.dspark import FrozenTarget
from torch_port.models.eagle3 import Eagle3Draft
from torch_port.models.heads import wide
from torch_port.objective.loss import NO_SUPERVISION, NOTHING_INSIDE
from torch_port.objective.metrics import Pair
from torch_port.objective.products import product
from torch_port.objective.teacher import normalizer_and_best

CHUNK = 256  # slots whose logits exist at once: positions times steps


@dataclass(frozen=True)
class Eagle3Batch:
    """A batch and what the frozen target says over all of V at each of its positions, [B, S]."""

    batch: Batch
    log_normalizer: Tensor  # float32 or better
    best: Tensor  # argmax, a target id
    best_draft_id: Tensor  # −100 where it was pruned


@dataclass(frozen=True)
class Eagle3Denominators:
    """Sums over ranks and micro-batches: B·S, and step 0's supervised and counted slots.

    Later steps' slots are among step 0's: where it has none, no step has any.
    """

    positions: Tensor
    den: Tensor
    ce_den: Tensor


@dataclass(frozen=True)
class Eagle3Terms:
    """Every slot's values, [J, B, P], 0 where they do not count; `ce` carries gradient."""

    supervised: Tensor  # bool: the label is
    counted: Tensor  # bool: and the teacher's argmax over V is kept
    ce: Tensor  # −Σ p̃ log q, where counted
    accept: Tensor  # α = Σ min(q, p), where supervised
    kept_mass: Tensor  # Σ p over kept ids, where supervised
    correct: Tensor  # 1[argmax z, as a target id, = argmax ℓ], where supervised


@dataclass(frozen=True)
class Eagle3Outcome:
    """What a forward pass gives; `numerators` is each step's Σ ce, [J], without gradient."""

    states: list[Tensor]
    terms: Eagle3Terms
    numerators: Tensor
    metrics: dict[str, Pair]
    loss: Tensor | None  # with gradient; None when no denominators were given


def prepare_eagle3(draft: Eagle3Draft, batch: Batch, target: FrozenTarget) -> Eagle3Batch:
    """Read the teacher once over all of V: which argmax counts must be known before the forward.

    A stored `target_log_normalizer` is used as it is.
    Raises UserError before a vocabulary map is installed.
    """
    index_V = draft.draft_vocab_index()
    normalizer, best = normalizer_and_best(batch.target_last_hidden_states, target.lm_head)
    if batch.target_log_normalizer is not None:
        normalizer = batch.target_log_normalizer
    best_draft_id = index_V.index_select(0, best.flatten()).view(best.shape)
    return Eagle3Batch(batch, normalizer, best, best_draft_id)


def eagle3_denominators(
    draft: Eagle3Draft, prepared: Eagle3Batch, objective: Eagle3Objective
) -> Tensor:
    """Return this batch's [B·S, supervised slots, counted slots] of step 0, shape [3]."""
    dtype = torch.promote_types(prepared.batch.hidden_states.dtype, torch.float32)
    supervised_1BP, counted_1BP = _masks(prepared, 1)
    positions = supervised_1BP.new_full((), prepared.batch.input_ids.numel(), dtype=dtype)
    return torch.stack([positions, supervised_1BP.sum().to(dtype), counted_1BP.sum().to(dtype)])


def reduce_eagle3_denominators(draft: Eagle3Draft, local: Tensor) -> Eagle3Denominators:
    """Sum over the ranks: one all-reduce of the three numbers, pruned or not."""
    total = local.clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return Eagle3Denominators(*total.unbind())


def check_eagle3_denominators(den: float, ce_den: float, objective: Eagle3Objective) -> None:
    """Raise the step's two errors on the sums over all ranks and micro-batches (§8's words)."""
    if den == 0:
        raise UserError(
            f"{NO_SUPERVISION}: no position from the third one on is supervised; check the loss "
            "masks, and filter samples without one"
        )
    if ce_den == 0:
        raise UserError(
            f"{NOTHING_INSIDE}: the draft vocabulary keeps the teacher's argmax at no slot of this "
            "step; raise draft_vocab_size, or build the map from this corpus"
        )


def forward_eagle3(
    draft: Eagle3Draft,
    prepared: Eagle3Batch,
    target: FrozenTarget,
    objective: Eagle3Objective,
    denominators: Eagle3Denominators | None = None,
    ranks: int = 1,
) -> Eagle3Outcome:
    """Run a batch: the draft's steps, every slot's terms, metric pairs, loss.

    loss = ranks · Σ_i step_decay^i · Σ ce_i / Σ_ranks (B·S). Without `denominators` there is no
    loss, for evaluation.
    """
    batch = prepared.batch
    # A share of 0 would not stop a NaN or Inf of a state that nothing reads (field-note 9).
    read_BS1 = _read_states(batch.loss_mask).unsqueeze(-1)
    captured_BSF = torch.where(read_BS1, batch.hidden_states, 0)
    states = draft(batch.input_ids, captured_BSF, target, objective.steps)
    terms = eagle3_terms(draft, states, prepared, target)
    ce_J = terms.ce.sum((1, 2))
    loss = None if denominators is None else _loss(ce_J, denominators, objective, ranks)
    metrics = _metric_pairs(terms, batch.input_ids.numel())
    return Eagle3Outcome(states, terms, ce_J.detach(), metrics, loss)


def whole_eagle3_loss(
    draft: Eagle3Draft, numerators: Sequence[Tensor], local: Tensor, objective: Eagle3Objective
) -> Tensor:
    """Return the loss of several batches taken as one, from their outcomes' numerators.

    `local` is the sum of their denominators. Raises the step's two errors.
    """
    denominators = Eagle3Denominators(*local.unbind())
    check_eagle3_denominators(denominators.den.item(), denominators.ce_den.item(), objective)
    return _loss(torch.stack(list(numerators)).sum(0), denominators, objective, 1)


def _loss(
    ce_J: Tensor, denominators: Eagle3Denominators, objective: Eagle3Objective, ranks: int
) -> Tensor:
    weight_J = step_weights(objective.step_decay, objective.steps, ce_J.dtype, ce_J.device)
    return ranks * (weight_J * ce_J).sum() / denominators.positions


@lru_cache(maxsize=16)
def step_weights(decay: float, steps: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return decay^i of every training-time-test step, kept on the device between steps."""
    with torch.inference_mode(False):  # training may need them next
        return torch.tensor([decay**i for i in range(steps)], dtype=dtype, device=device)


def eagle3_terms(
    draft: Eagle3Draft,
    states: list[Tensor],
    prepared: Eagle3Batch,
    target: FrozenTarget,
    chunk: int = CHUNK,
) -> Eagle3Terms:
    """Compute every slot's terms, a few positions at a time; `chunk` moves no number.

    Arguments: the draft; its normalised states, J of [B, S, H]; the prepared batch; the target.
    """
    J, H = len(states), states[0].shape[-1]
    supervised_JBP, counted_JBP = _masks(prepared, J)
    hidden_JTH = _by_teacher_position(states).flatten(1, 2)
    supervised_JT, counted_JT = supervised_JBP.flatten(1), counted_JBP.flatten(1)
    teacher_BSH = prepared.batch.target_last_hidden_states
    teacher_TH = teacher_BSH[:, 1:-1].reshape(-1, H)
    normalizer_T, best_T = (
        values[:, 1:-1].flatten() for values in (prepared.log_normalizer, prepared.best_draft_id)
    )
    size = max(1, chunk // J)
    parts = [
        checkpoint(
            _chunk_terms,
            hidden_JTH[:, at],
            draft.lm_head.weight,
            teacher_TH[at],
            draft.draft_head(target.lm_head),
            normalizer_T[at],
            best_T[at],
            supervised_JT[:, at],
            counted_JT[:, at],
            use_reentrant=False,
            preserve_rng_state=False,  # nothing in a chunk draws
        )
        # An empty chunk at least: every rank's backward reaches the head (field-note 15).
        for at in (slice(i, i + size) for i in range(0, max(1, len(teacher_TH)), size))
    ]
    whole = [torch.cat(pieces, 1) for pieces in zip(*parts, strict=True)]
    return Eagle3Terms(
        supervised_JBP, counted_JBP, *(values.view(supervised_JBP.shape) for values in whole)
    )


def _chunk_terms(
    hidden_JCH: Tensor,
    head_KH: Tensor,
    teacher_CH: Tensor,
    teacher_head_KH: Tensor,
    normalizer_C: Tensor,
    best_C: Tensor,
    supervised_JC: Tensor,
    counted_JC: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # What does not count is replaced before it enters an operation: a weight of 0 would not stop
    # the gradient of a NaN (field-note 9).
    any_C = supervised_JC.any(0)
    with torch.no_grad():
        teacher_CK = product(torch.where(any_C.unsqueeze(-1), teacher_CH, 0), teacher_head_KH)
        conditional_CK = teacher_CK.softmax(-1)
        true_CK = (teacher_CK - normalizer_C.unsqueeze(-1)).exp()
    hidden_JCH = torch.where(supervised_JC.unsqueeze(-1), hidden_JCH, 0)
    logits_JCK = wide(hidden_JCH) @ wide(head_KH).T
    log_q_JCK = logits_JCK.log_softmax(-1)
    ce_JC = torch.where(counted_JC, -(conditional_CK * log_q_JCK).sum(-1), 0)
    with torch.no_grad():
        accept_JC = torch.minimum(log_q_JCK.exp(), true_CK).sum(-1).clamp(0, 1)
        mass_JC = true_CK.sum(-1).expand_as(accept_JC)
        # In draft ids, which d2t maps one to one: a pruned argmax, −100, equals none of them.
        correct_JC = (logits_JCK.argmax(-1) == best_C).to(ce_JC.dtype)
        values = (torch.where(supervised_JC, x, 0) for x in (accept_JC, mass_JC, correct_JC))
    accept_JC, mass_JC, correct_JC = values
    return ce_JC, accept_JC, mass_JC, correct_JC


def _masks(prepared: Eagle3Batch, steps: int) -> tuple[Tensor, Tensor]:
    """Return (supervised, counted), bool [J, B, P], at teacher positions 1 … S − 2.

    Position p teaches step i's index p − 1 − i, if there is one; its label is at p + 1.
    """
    label_BP = prepared.batch.loss_mask[:, 2:] > 0.5
    place_P = torch.arange(label_BP.shape[1], device=label_BP.device)
    step_J11 = torch.arange(steps, device=label_BP.device).view(-1, 1, 1)
    supervised_JBP = label_BP & (place_P >= step_J11)
    return supervised_JBP, supervised_JBP & (prepared.best_draft_id[:, 1:-1] >= 0)


def _read_states(loss_mask_BS: Tensor) -> Tensor:
    """Return which captured states a supervised slot reads, bool [B, S].

    Step 0's slots read furthest: the last one stands two before the last supervised token, and
    reads its own state and all before it.
    """
    place_S = torch.arange(loss_mask_BS.shape[1], device=loss_mask_BS.device)
    last_B1 = torch.where(loss_mask_BS > 0.5, place_S, -1).amax(1, keepdim=True)
    return place_S + 2 <= last_B1


def _by_teacher_position(states: list[Tensor]) -> Tensor:
    """Return states [J, B, P, H]: at p − 1 stands step i's state at index p − 1 − i, else 0."""
    P = max(0, states[0].shape[1] - 2)
    return torch.stack(
        [F.pad(x[:, : max(0, P - i)], (0, 0, min(i, P), 0)) for i, x in enumerate(states)]
    )


def _metric_pairs(terms: Eagle3Terms, positions: int) -> dict[str, Pair]:
    """Return the metric pairs: per step [J], and acc and acceptance over all steps."""
    dtype, slots = terms.ce.dtype, (1, 2)
    supervised_J = terms.supervised.sum(slots).to(dtype)
    counted_J = terms.counted.sum(slots).to(dtype)
    pairs = {
        "acc": (terms.correct.sum(), supervised_J.sum()),
        "accept": (terms.accept.sum(), supervised_J.sum()),
        "teacher_kept_mass": (terms.kept_mass.sum(), supervised_J.sum()),
        "teacher_argmax_kept": (counted_J.sum(), supervised_J.sum()),
        "loss_step": (terms.ce.sum(slots), torch.full_like(counted_J, positions)),
        "ce_step": (terms.ce.sum(slots), counted_J),
        "accuracy_step": (terms.correct.sum(slots), supervised_J),
        "accept_step": (terms.accept.sum(slots), supervised_J),
    }
    return {name: (top.detach(), bottom.detach()) for name, (top, bottom) in pairs.items()}
