"""Toy drafts, targets, maps and batches; the sizes of the field notes (V = 16, K = 5, γ = 4)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings

from jaxdraft import Batch, DraftConfig, DSparkDraft, Target, VocabularyMap, map_from_buffers

# XLA compiles within the first example: no deadline. Derandomised: a red run is red again.
few_examples = settings(deadline=None, max_examples=25, derandomize=True)

KEPT = [0, 3, 4, 9, 12]
V, K, SLOTS, SEQ, BLOCKS, HIDDEN = 16, 5, 4, 10, 3, 8

HF: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "vocab_size": V,
    "draft_vocab_size": K,
    "hidden_size": HIDDEN,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "block_size": SLOTS,
    "num_target_layers": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dflash_config": {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "target_layer_ids": [0, 2],
        "mask_token_id": 3,
        "markov_rank": 3,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}

NO_HEADS: dict[str, Any] = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}


def hf(**changes: Any) -> dict[str, Any]:
    """The toy config.json with fields changed, wherever they live."""
    mapping = {**HF, "dflash_config": dict(HF["dflash_config"])}
    for field, value in changes.items():
        home = mapping["dflash_config"] if field in HF["dflash_config"] else mapping
        home[field] = value
    return mapping


def config(**changes: Any) -> DraftConfig:
    return DraftConfig.from_hf(hf(**changes))


def dflash_config(own: dict[str, Any] | None = None, **changes: Any) -> DraftConfig:
    """The toy as a DFlash draft: no head fields; `own` goes under dflash_config."""
    nested = {"projector_type": "dflash", "target_layer_ids": [0, 2], "mask_token_id": 3}
    changed = {"architectures": ["DFlashDraftModel"], "dflash_config": nested | (own or {})}
    return DraftConfig.from_hf({**HF, **changed, **changes})


def toy_map() -> VocabularyMap:
    t2d = np.zeros(V, dtype=bool)
    t2d[KEPT] = True
    return map_from_buffers(t2d, np.array(KEPT) - np.arange(K))


def shapes(of: DraftConfig) -> Any:
    """The draft's parameter tree, as shapes and dtypes."""
    arrays = (
        jnp.zeros((1, SEQ, len(of.target_layer_ids) * of.hidden_size)),
        jnp.zeros((1, 1, of.block_size, of.hidden_size)),
        jnp.zeros((1, 1), dtype=int),
        jnp.ones((1, 1), dtype=bool),
        jnp.zeros((1, 1, of.block_size), dtype=int),
        jnp.zeros((of.draft_vocab_size, of.hidden_size)),
    )
    model = DSparkDraft(of, param_dtype=jnp.float64)
    return jax.eval_shape(lambda key: model.init(key, *arrays), jax.random.key(0))["params"]


def params(of: DraftConfig, seed: int = 0) -> Any:
    """Random parameters, large enough that every one of them shows in the loss."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0.5, 0.5, s.shape)), shapes(of))


def target(seed: int = 1) -> Target:
    rng = np.random.default_rng(seed)
    return Target(*(jnp.asarray(rng.normal(size=(V, HIDDEN))) for _ in range(2)))


def batch(seed: int = 2, **changes: Any) -> Batch:
    """Two rows of 10; block 3 of the second row is dropped; one label in three is unsupervised."""
    rng = np.random.default_rng(seed)
    fields = {
        "input_ids": jnp.asarray(rng.integers(0, V, (2, SEQ))),
        "loss_mask": jnp.asarray([[0, 1, 1, 1, 1, 1, 0, 1, 1, 1], [1] * 7 + [0] * 3], dtype=float),
        "hidden_states": jnp.asarray(rng.normal(size=(2, SEQ, 2 * HIDDEN))),
        "target_last_hidden_states": jnp.asarray(rng.normal(size=(2, SEQ, HIDDEN))),
        "anchor_positions": jnp.asarray([[1, 3, 7], [0, 4, 0]]),
        "block_keep_mask": jnp.asarray([[True, True, True], [True, True, False]]),
    }
    return Batch(**{**fields, **changes})
