"""What `benchmarks.precision` measures against: inputs in a dtype, and the float64 answers.

The reference is spec sheet §7 and §8 written once more, over all slots at a time in float64, with
autograd for the gradients. Of the port it takes the block layout and, for gradients of backbone
weights, the backbone run in float64 with dense attention; parity holds both at 1e-10.

Shape suffixes: B batch (1 here), S sequence, N blocks, G slots, V target ids, K draft ids, H hidden
size, r Markov rank.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases import OBJECTIVE, SEED, Inputs, step_inputs
from benchmarks.shapes import AttentionShape, ObjectiveShape, StepShape
from torch_port.compute import ComputeConfig
from torch_port.data.batch import Batch
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.evaluate import batch_denominators, batch_objective, layout_blocks
from torch_port.objective.loss import reduce_denominators
from torch_port.objective.teacher import log_normalizer
from torch_port.training.step import accumulate_gradients

FUSED = ComputeConfig()
PLAIN = ComputeConfig(objective="plain", attention="dense")
KINDS = {"cool": 1.0, "hot": 8.0, "near": 8.0}  # standard deviation of the logits
MOST_IDS = 1 << 17
TERMS = ("ce", "l1", "accept", "kept_mass", "confidence_loss")
WEIGHTS = {"d W1": "markov_head.markov_w1.weight", "d W2": "markov_head.markov_w2.weight"}
STEP_WEIGHTS = {
    "d layers.0 up_proj": "layers.0.mlp.up_proj.weight",
    "d layers.0 q_proj": "layers.0.self_attn.q_proj.weight",
    "d layers.0 k_norm": "layers.0.self_attn.k_norm.weight",
    "d fc": "fc.weight",
    "d W1": "markov_head.markov_w1.weight",
}
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A batch with draft, target and hidden states, all in one dtype."""

    draft: DSparkDraft
    batch: Batch
    target: FrozenTarget
    hidden_BNGH: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        """Return the case in another dtype; a stored normaliser goes with the states it is of."""
        cpu = torch.device("cpu")
        return Case(
            copy.deepcopy(self.draft).to(dtype),
            self.batch.to(cpu, dtype),
            FrozenTarget(self.target.embed_tokens.to(dtype), self.target.lm_head.to(dtype)),
            self.hidden_BNGH.to(dtype),
        )

    def stored(self) -> Case:
        """Return the case with the normaliser computed from its own stored states and head."""
        states = self.batch.target_last_hidden_states
        normalizer = log_normalizer(states, self.target.lm_head)
        return replace(self, batch=replace(self.batch, target_log_normalizer=normalizer))


def shape_of(draft_vocab: int, quick: bool) -> StepShape:
    """Return the study's sizes: V = 4K up to `MOST_IDS`, 8 blocks of 8 slots, two layers."""
    H, S, N = (32, 24, 4) if quick else (128, 64, 8)
    vocab = min(4 * draft_vocab, MOST_IDS)
    return StepShape(
        ObjectiveShape(H, draft_vocab, vocab, S, N, block=8, rank=H // 4),
        AttentionShape(S, N, block=8, heads=4, kv_heads=2, head_dim=H // 4),
        layers=2,
        intermediate=2 * H,
        captured=2,
    )


def make_case(draft_vocab: int, kind: str, quick: bool = False) -> Case:
    """Draw a case in float32.

    "cool" and "hot": hidden states and teacher know nothing of each other, logits of standard
    deviation 1 and 8. "near": hot, and the hidden states are the teacher's with a tenth of noise.
    Half of the tokens are one of eight, so that rows of W1 are read often.
    """
    shape = shape_of(draft_vocab, quick)
    inputs = step_inputs(shape)
    generator = torch.Generator().manual_seed(SEED + 1)
    heat = KINDS[kind]
    draft = _weights(inputs, heat if kind != "near" else 0.1, generator)
    target = FrozenTarget(inputs.target.embed_tokens, inputs.target.lm_head * heat)
    ids = inputs.batch.input_ids
    frequent = inputs.kept_K[torch.randint(8, ids.shape, generator=generator)]
    often = torch.rand(ids.shape, generator=generator) < 0.5
    batch = replace(inputs.batch, input_ids=torch.where(often, frequent, ids))
    hidden = torch.randn(1, shape.objective.anchors, 8, shape.objective.hidden, generator=generator)
    if kind == "near":
        at = layout_blocks(draft, batch).teacher_position
        hidden = batch.target_last_hidden_states[0][at] + 0.1 * hidden
    return Case(draft, batch, target, hidden)


def _weights(inputs: Inputs, bias: float, generator: torch.Generator) -> DSparkDraft:
    """A draft whose Markov bias has standard deviation `bias`, and whose layers do something."""
    draft = inputs.draft(FUSED)
    assert draft.markov_head is not None
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        draft.markov_head.markov_w1.weight.normal_(0, 1, generator=generator)
        draft.markov_head.markov_w2.weight.mul_(bias)
    return draft


# --- The port, and the float64 answers -----------------------------------------------------------


def objective_values(case: Case, compute: ComputeConfig) -> Values:
    """Return the port's terms, loss and gradients of h, W1 and W2, from given hidden states."""
    draft = with_compute(case.draft, compute)
    for parameter in draft.parameters():  # as the training step has it
        parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)
    blocks = layout_blocks(draft, case.batch)
    hidden = case.hidden_BNGH.clone().requires_grad_()
    local = batch_denominators(draft, case.batch, OBJECTIVE)
    denominators = reduce_denominators(local, draft.prunes_vocabulary)
    terms, loss = batch_objective(
        draft, hidden, blocks, case.batch, case.target, OBJECTIVE, denominators, 1
    )
    assert loss is not None
    torch.autograd.backward(loss)
    assert hidden.grad is not None
    values = {name: getattr(terms, name).detach() for name in TERMS}
    gradients = _gradients(draft, WEIGHTS)
    return values | {"loss": loss.detach(), "d h": hidden.grad} | gradients


def step_values(case: Case, compute: ComputeConfig) -> Values:
    """Return the port's loss and gradients of some weights, from a batch through the backbone."""
    draft = with_compute(case.draft, compute)
    loss, *_ = accumulate_gradients(draft, [case.batch], case.target, OBJECTIVE)
    return {"loss": loss} | _gradients(draft, STEP_WEIGHTS)


def with_compute(draft: DSparkDraft, compute: ComputeConfig) -> DSparkDraft:
    """Copy a draft, to compute as said and to take gradients of its own."""
    draft = copy.deepcopy(draft)
    draft.compute = compute
    return draft


def _gradients(draft: DSparkDraft, names: dict[str, str]) -> Values:
    weights = dict(draft.named_parameters())
    found = {shown: weights[name].grad for shown, name in names.items()}
    return {shown: gradient for shown, gradient in found.items() if gradient is not None}


def reference_objective(case: Case) -> Values:
    """Return what `objective_values` should, in float64 from the case's own values."""
    wide = case.to(torch.float64)
    hidden = wide.hidden_BNGH.requires_grad_()
    values, loss = _reference(wide, hidden)
    torch.autograd.backward(loss)
    assert hidden.grad is not None
    gradients = _gradients(wide.draft, WEIGHTS)
    return values | {"loss": loss.detach(), "d h": hidden.grad} | gradients


def reference_step(case: Case) -> Values:
    """Return what `step_values` should, in float64 from the case's own values."""
    wide = case.to(torch.float64)
    batch = wide.batch
    hidden = wide.draft(
        layout_blocks(wide.draft, batch),
        batch.hidden_states,
        batch.anchor_positions,
        batch.block_keep_mask,
        wide.target,
    )
    _, loss = _reference(wide, hidden)
    torch.autograd.backward(loss)
    return {"loss": loss.detach()} | _gradients(wide.draft, STEP_WEIGHTS)


def _reference(case: Case, hidden_BNGH: Tensor) -> tuple[Values, Tensor]:
    draft, target, o = case.draft, case.target, OBJECTIVE
    assert draft.markov_head is not None
    assert draft.confidence_head is not None
    assert o.loss_decay_gamma is not None
    blocks = layout_blocks(draft, case.batch)
    M = blocks.evaluated.double()
    e = draft.markov_head.markov_w1.weight[blocks.previous]
    U_KH = target.lm_head[draft.t2d]
    z = hidden_BNGH @ U_KH.T + e @ draft.markov_head.markov_w2.weight.T
    q = z.softmax(-1)
    with torch.no_grad():
        states_SH = case.batch.target_last_hidden_states[0]
        kept_SK = states_SH @ U_KH.T
        everything_S = (states_SH @ target.lm_head.T).logsumexp(-1)
        at = blocks.teacher_position
        conditional = kept_SK.softmax(-1)[at]
        true = (kept_SK - everything_S.unsqueeze(-1)).exp()[at]
        accept = torch.minimum(q, true).sum(-1)
    kept = M * blocks.label_is_kept
    chosen = z.gather(-1, blocks.label_draft_id.unsqueeze(-1)).squeeze(-1)
    ce = kept * (z.logsumexp(-1) - chosen)
    l1 = M * (q - conditional).abs().sum(-1)
    logit = draft.confidence_head.proj(torch.cat([hidden_BNGH, e], -1)).squeeze(-1)
    confidence = M * F.binary_cross_entropy_with_logits(logit, accept, reduction="none")
    w = M * torch.exp(-torch.arange(M.shape[-1], dtype=M.dtype) / o.loss_decay_gamma)
    rest = o.l1_alpha * (w * l1).sum() + o.confidence_alpha * (w * confidence).sum()
    loss = o.ce_alpha * (w * ce).sum() / (w * kept).sum() + rest / w.sum()
    terms = dict(zip(TERMS, (ce, l1, M * accept, M * true.sum(-1), confidence), strict=True))
    return {name: value.detach() for name, value in terms.items()}, loss


def error(got: Tensor, want: Tensor) -> float:
    """Return the largest error, relative to the largest magnitude of what it should be."""
    return float((got.double() - want).abs().max() / want.abs().max())


def errors(got: Values, want: Values) -> dict[str, float]:
    """Return the error of every value by name."""
    return {name: error(got[name], want[name]) for name in want}
