"""The port's side of each comparison: what is called, and nothing else. Adapters, in one place."""

from __future__ import annotations

from torch import Tensor

from benchmarks.cases import OBJECTIVE, AttentionInputs
from torch_port.blocks import Blocks, slot_weights
from torch_port.data.batch import Batch
from torch_port.layout import Layout, lay_out
from torch_port.models.attention import draft_attention
from torch_port.models.blockwise import blockwise_attention
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.evaluate import batch_denominators, batch_objective, forward_batch
from torch_port.objective.loss import Denominators, reduce_denominators
from torch_port.objective.metrics import metric_pairs


def denominators_of(draft: DSparkDraft, batch: Batch) -> Denominators:
    """Return the step's denominators."""
    return reduce_denominators(batch_denominators(draft, batch, OBJECTIVE), draft.prunes_vocabulary)


def objective_only(
    draft: DSparkDraft,
    hidden_BNGH: Tensor,
    blocks: Blocks,
    batch: Batch,
    target: FrozenTarget,
    denominators: Denominators,
) -> Tensor:
    """Run the objective from given hidden states to loss and metrics; returns the loss."""
    terms, loss = batch_objective(
        draft, hidden_BNGH, blocks, batch, target, OBJECTIVE, denominators, 1
    )
    weights = slot_weights(blocks.evaluated, OBJECTIVE.loss_decay_gamma, terms.l1.dtype)
    metric_pairs(terms, blocks, weights, prunes=draft.prunes_vocabulary, confidence=True)
    assert loss is not None  # denominators were given
    return loss


def whole_step(draft: DSparkDraft, batch: Batch, target: FrozenTarget) -> Tensor:
    """Run a step forward: denominators, layout, backbone, objective, metrics; returns the loss."""
    outcome = forward_batch(draft, batch, target, OBJECTIVE, denominators_of(draft, batch))
    assert outcome.loss is not None  # denominators were given
    return outcome.loss


def dense_attention(inputs: AttentionInputs, mask: Tensor, keep_BQ: Tensor) -> Tensor:
    """Attend in the port's dense form, [B, A, Q, D]."""
    return draft_attention(inputs.q, inputs.k_joined, inputs.v_joined, mask, keep_BQ)


def layout_of(inputs: AttentionInputs, block_size: int) -> Layout:
    """Find the layout that the blockwise form walks."""
    B, _, sequence, _ = inputs.k_context.shape
    supervised = inputs.d_out.new_ones(B, sequence)
    return lay_out(supervised, inputs.anchors_BN, inputs.keep_BN, block_size)


def blockwise(inputs: AttentionInputs, layout: Layout) -> Tensor:
    """Attend in the port's blockwise form, [B, A, Q, D]."""
    context, own = (inputs.k_context, inputs.v_context), (inputs.k_own, inputs.v_own)
    return blockwise_attention(inputs.q, context, own, layout, None)
