"""Inputs of the measured shapes: random weights, tokens and states, drawn from one seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.shapes import AttentionShape, ObjectiveShape, StepShape
from torch_port.anchors import draw_anchors
from torch_port.compute import ComputeConfig
from torch_port.config import FULL, DraftConfig, ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.vocabulary.mapping import buffers_from_kept

SEED = 7
OBJECTIVE = ObjectiveConfig(loss_decay_gamma=4.0)
CAPTURED_ALONE = 1  # captured layers where only the objective is measured: not read there


@dataclass(frozen=True)
class Inputs:
    """A batch of one row, the frozen target, and the draft's config with its kept ids."""

    config: DraftConfig
    batch: Batch
    target: FrozenTarget
    kept_K: Tensor

    def draft(self, compute: ComputeConfig) -> DSparkDraft:
        """Make the draft; the same weights for every `compute`."""
        draft = DSparkDraft(self.config, compute=compute)
        draft.initialise(torch.Generator().manual_seed(SEED))
        if draft.prunes_vocabulary:
            draft.install_vocab_mapping(*buffers_from_kept(self.kept_K, self.config.vocab_size))
        return draft

    def with_normaliser(self) -> Batch:
        """Return the batch as it is when the features store log Σ exp over all of V."""
        b = self.batch
        logits = b.target_last_hidden_states @ self.target.lm_head.T
        return Batch(
            b.input_ids,
            b.loss_mask,
            b.hidden_states,
            b.target_last_hidden_states,
            b.anchor_positions,
            b.block_keep_mask,
            target_log_normalizer=logits.logsumexp(-1),
        )


def objective_inputs(shape: ObjectiveShape) -> Inputs:
    """Draw inputs for the objective alone: the smallest backbone, which is not run."""
    small = AttentionShape(shape.sequence, shape.anchors, shape.block, 1, 1, 2)
    return step_inputs(StepShape(shape, small, 1, 1, CAPTURED_ALONE))


def step_inputs(shape: StepShape) -> Inputs:
    """Draw inputs for a whole step: every position supervised, anchors as training draws them."""
    sizes, heads = shape.objective, shape.attention
    generator = torch.Generator().manual_seed(SEED)
    H, S, V = sizes.hidden, sizes.sequence, sizes.vocab

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator) * scale

    mask = torch.ones(1, S)
    anchors, keep = draw_anchors(mask.numpy(), [0], sizes.anchors, SEED, 0)
    batch = Batch(
        input_ids=torch.randint(V, (1, S), generator=generator),
        loss_mask=mask,
        hidden_states=normal(1, S, shape.captured * H),
        target_last_hidden_states=normal(1, S, H),
        anchor_positions=torch.from_numpy(anchors),
        block_keep_mask=torch.from_numpy(keep),
    )
    kept = torch.randperm(V, generator=generator)[: sizes.draft_vocab].sort().values
    config = DraftConfig(
        vocab_size=V,
        draft_vocab_size=sizes.draft_vocab,
        hidden_size=H,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads.heads,
        num_key_value_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        layer_types=(FULL,) * shape.layers,
        block_size=sizes.block,
        num_target_layers=shape.captured + 1,
        target_layer_ids=tuple(range(shape.captured)),
        mask_token_id=0,
        markov_rank=sizes.rank,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    # Logits of standard deviation 1: neither a flat nor a one-hot teacher.
    target = FrozenTarget(normal(V, H), normal(V, H, scale=H**-0.5))
    return Inputs(config, batch, target, kept)


@dataclass(frozen=True)
class AttentionInputs:
    """q [B, A, Q, D]; k and v of context [B, R, S, D] and own block [B, R, Q, D]; d(output).

    The dense forms project one sequence [context ; own], so they get k and v [B, R, S + Q, D] of
    their own, equal to the two parts joined.
    """

    q: Tensor
    k_context: Tensor
    k_own: Tensor
    v_context: Tensor
    v_own: Tensor
    k_joined: Tensor
    v_joined: Tensor
    d_out: Tensor
    anchors_BN: Tensor
    keep_BN: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that take a gradient."""
        parts = (self.q, self.k_context, self.k_own, self.v_context, self.v_own)
        return (*parts, self.k_joined, self.v_joined)


def attention_inputs(shape: AttentionShape) -> AttentionInputs:
    """Draw inputs for one attention call, anchors as training draws them."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, shape.head_dim, generator=generator)

    queries = shape.anchors * shape.block
    mask = np.ones((1, shape.sequence), dtype=np.float32)
    anchors, keep = draw_anchors(mask, [0], shape.anchors, SEED, 0)
    q, d_out = normal(shape.heads, queries), normal(shape.heads, queries)
    k_parts, v_parts = (
        (normal(shape.kv_heads, shape.sequence), normal(shape.kv_heads, queries)) for _ in "kv"
    )
    joined = (torch.cat(k_parts, dim=2), torch.cat(v_parts, dim=2))
    leaves = (q, *k_parts, *v_parts, *joined)
    for leaf in leaves:
        leaf.requires_grad_()
    return AttentionInputs(
        *leaves,
        d_out=d_out,
        anchors_BN=torch.from_numpy(anchors),
        keep_BN=torch.from_numpy(keep),
    )
