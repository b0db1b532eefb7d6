"""Toy drafts and batches for the port's tests: the field notes' sizes, float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_port.config import DraftConfig
from torch_port.data.batch import Batch
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.vocabulary.mapping import DraftVocabMappingMixin, buffers_from_kept

V, H, S, G = 16, 8, 12, 4
KEPT = (0, 3, 4, 9, 12)


def hf_config(**changes: Any) -> dict[str, Any]:
    """A config.json of the field, with changes at the level where the field has them."""
    nested = {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "target_layer_ids": [0, 2],
        "mask_token_id": 1,
        "markov_rank": 3,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    top = {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "vocab_size": V,
        "draft_vocab_size": len(KEPT),
        "hidden_size": H,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "block_size": G,
        "num_target_layers": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    for name, value in changes.items():
        (nested if name in nested else top)[name] = value
    return top | {"dflash_config": nested}


def config(**changes: Any) -> DraftConfig:
    return DraftConfig.from_hf(hf_config(**changes))


def toy_map() -> tuple[Tensor, Tensor]:
    return buffers_from_kept(torch.tensor(KEPT), V)


def draft(seed: int = 0, scale: float = 10.0, **changes: Any) -> DSparkDraft:
    """A float64 draft with weights large enough that every path matters."""
    model = DSparkDraft(config(**changes)).double()
    model.initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed + 1))
    if model.prunes_vocabulary:
        model.install_vocab_mapping(*toy_map())
    return model


def to_meta(model: DraftVocabMappingMixin, dtype: torch.dtype) -> None:
    """Move a draft to torch's meta device, which has no values; its map was read on the host first.

    On a device that has values this is one read at the first step.
    """
    model.pruned_target_ids()
    read = model._vocabulary()
    assert read.pruned_P is not None
    model.to("meta", dtype)
    kept_K, pruned_P = (ids.to("meta") for ids in (read.kept_K, read.pruned_P))
    model._derived = replace(
        read, stamp=model._stamp(), kept_K=kept_K, pruned_P=pruned_P, index_V=None, head=None
    )


def target(seed: int = 1, vocab_size: int = V) -> FrozenTarget:
    g = torch.Generator().manual_seed(seed)
    return FrozenTarget(
        torch.randn(vocab_size, H, generator=g, dtype=torch.float64),
        torch.randn(vocab_size, H, generator=g, dtype=torch.float64),
    )


def batch(
    loss_mask: list[list[float]] | None = None,
    anchors: list[list[int]] | None = None,
    keep: list[list[bool]] | None = None,
    seed: int = 2,
) -> Batch:
    """Two rows; by default one block of the second row is dropped and one label unsupervised."""
    if loss_mask is None:
        loss_mask = [[0, 0] + [1] * 10, [0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0]]
    anchors = anchors or [[2, 5, 8], [3, 7, 0]]
    keep = keep or [[True, True, True], [True, True, False]]
    random = np.random.default_rng(seed)
    B = len(loss_mask)
    return Batch(
        input_ids=torch.from_numpy(random.integers(0, V, (B, S))),
        loss_mask=torch.tensor(loss_mask, dtype=torch.float64),
        hidden_states=torch.from_numpy(random.normal(size=(B, S, 2 * H))),
        target_last_hidden_states=torch.from_numpy(random.normal(size=(B, S, H))),
        anchor_positions=torch.tensor(anchors),
        block_keep_mask=torch.tensor(keep),
    )
