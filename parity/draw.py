"""Cases drawn at random: weights, map, target and batch of a recipe, from a seed.

`parity emit` writes some of them as vectors; the suite's cases start here (parity/configurations).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from parity.cases import Array, Case
from parity.recipes import (
    BARE,
    DECODING,
    EAGLE3,
    NESTED,
    OBJECTIVE,
    OPTIMIZER,
    TOP,
    B,
    H,
    N,
    Recipe,
    S,
    V,
)


def draw_recipe(recipe: Recipe, seed: int) -> Case:
    """Draw the case of a recipe: weights, map, target and batch are functions of the seed alone."""
    random = np.random.default_rng([20260, seed])
    if recipe.eagle3 is not None:
        return _draw_eagle3(recipe, random)
    top, nested = dict(TOP), dict(NESTED)
    for name, value in recipe.config.items():
        (nested if name in nested else top)[name] = value
    if recipe.layout == "dflash":
        top["architectures"] = ["DFlashDraftModel"]
        nested = {name: nested[name] for name in BARE} | {"projector_type": "dflash"}
    config = top | {"dflash_config": nested}
    kept_count = top["draft_vocab_size"] or V
    kept = np.sort(random.permutation(V)[:kept_count])
    tensors = {f"weights/{n}": _weights(n, s, random) for n, s in _shapes(config).items()}
    if kept_count < V:
        t2d = np.zeros(V, dtype=bool)
        t2d[kept] = True
        tensors["weights/t2d"] = t2d
        tensors["weights/d2t"] = kept - np.arange(kept_count)
    for name in ("embed_tokens", "lm_head"):
        tensors[f"target/{name}.weight"] = normal(random, (V, H), 0.6)
    for step in range(recipe.steps):
        batch = draw_batch(recipe, kept, random)
        tensors |= {name.replace("batch/", f"steps/{step}/"): v for name, v in batch.items()}
    extra: dict[str, Any] = {}
    if recipe.steps:
        extra = {"optimizer": OPTIMIZER | {"total_steps": recipe.steps}}
    elif recipe.decoding is not None:
        extra = {"decoding": DECODING | recipe.decoding}
        tensors |= _toy_target(recipe, tensors, kept, random)
    else:
        tensors |= draw_batch(recipe, kept, random)
    return Case(
        name=recipe.name,
        path=Path(recipe.name),
        config=config,
        objective=(OBJECTIVE if recipe.layout == "dspark" else {}) | recipe.objective,
        expect={},
        tensors=tensors,
        extra=extra,
    )


def _draw_eagle3(recipe: Recipe, random: np.random.Generator) -> Case:
    """Draw an EAGLE3 case; about half of the teacher's choices are kept ids."""
    config = EAGLE3 | recipe.config
    kept_count = config["draft_vocab_size"] or V
    kept = np.sort(random.permutation(V)[:kept_count])
    shapes = _eagle3_shapes(config)
    tensors = {f"weights/{n}": _weights(n, s, random) for n, s in shapes.items()}
    # Always there, the identity too (§13).
    tensors["weights/t2d"] = np.isin(np.arange(V), kept)
    tensors["weights/d2t"] = kept - np.arange(kept_count)
    for name in ("embed_tokens", "lm_head"):
        tensors[f"target/{name}.weight"] = normal(random, (V, H), 0.6)
    choice = np.where(
        random.random((B, S)) < 0.5, random.choice(kept, (B, S)), random.integers(0, V, (B, S))
    )
    if recipe.labels == "pruned":
        choice = random.choice(np.setdiff1d(np.arange(V), kept), (B, S))
    # Near the row of its choice, so that the argmax is no accident of rounding.
    states = normal(random, (B, S, H), 0.2) + 2 * tensors["target/lm_head.weight"][choice]
    mask = (random.random((B, S)) < 0.8).astype(np.float32) * float(recipe.supervised)
    mask[1, -3:] = 0  # padding
    tensors |= {
        "batch/input_ids": random.integers(0, V, (B, S)).astype(np.int64),
        "batch/loss_mask": mask,
        "batch/hidden_states": normal(random, (B, S, 3 * H), 1.0),
        "batch/target_last_hidden_states": states,
    }
    return Case(
        name=recipe.name,
        path=Path(recipe.name),
        config=config,
        objective=recipe.objective,
        expect={},
        tensors=tensors,
        extra={"eagle3": recipe.eagle3},
    )


def _toy_target(
    recipe: Recipe, tensors: dict[str, Array], kept: Array, random: np.random.Generator
) -> dict[str, Array]:
    """Draw a target as tables, a prompt, and the uniforms of every round that there can be.

    The target leans on the draft's own Markov bias, so that rounds of every length occur. The
    frozen head is scaled down to let that bias speak, but its padding rows are scaled up: a draft
    that may propose padding ids does little else.
    """
    settings = DECODING | (recipe.decoding or {})
    n, limit, ids = settings["proposals"], settings["limit"], settings.get("tokenizer_size", V)
    head = tensors["target/lm_head.weight"] * np.float32(0.3 * (1 - 0.9 * recipe.agreement))
    head[ids:] *= np.float32(100)
    logits = normal(random, (V, V), 0.3 * (1 - 0.6 * recipe.agreement))
    logits[:, kept] += 1 + 2 * recipe.agreement
    if recipe.layout == "dspark":
        w1, w2 = (tensors[f"weights/markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
        logits[:, kept] += w1 @ w2.T
    return {
        "target/lm_head.weight": head,
        "toy/logits": logits.astype(np.float32),
        "toy/hidden_states": normal(random, (V, 2 * H), 1.0),
        "prompt": random.integers(0, ids, 3).astype(np.int64),
        "draws": random.random((limit, 2 * n + 1)).astype(np.float32),
    }


def normal(random: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    """Draw float32 numbers around 0."""
    return (random.normal(size=shape) * deviation).astype(np.float32)


def _weights(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Draw weights large enough that every one of them shows in the loss."""
    if name.endswith("norm.weight"):
        return 1 + normal(random, shape, 0.2)
    return normal(random, shape, 0.5 if len(shape) == 1 else 1 / math.sqrt(shape[-1]))


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name every weight of a draft with its shape (contracts §4)."""
    nested = config["dflash_config"]
    D, r, K = config["head_dim"], nested.get("markov_rank", 0), config["draft_vocab_size"] or V
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    inner = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(nested["target_layer_ids"]) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (H,),
            f"{layer}.post_attention_layernorm.weight": (H,),
            f"{layer}.self_attn.q_proj.weight": (q, H),
            f"{layer}.self_attn.k_proj.weight": (kv, H),
            f"{layer}.self_attn.v_proj.weight": (kv, H),
            f"{layer}.self_attn.o_proj.weight": (H, q),
            f"{layer}.self_attn.q_norm.weight": (D,),
            f"{layer}.self_attn.k_norm.weight": (D,),
            f"{layer}.mlp.gate_proj.weight": (inner, H),
            f"{layer}.mlp.up_proj.weight": (inner, H),
            f"{layer}.mlp.down_proj.weight": (H, inner),
        }
    if r:
        shapes |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (K, r)}
    extra = {"gated": ("gate_proj", r, H + r), "rnn": ("joint_proj", 3 * r, 2 * r + H)}
    if r and nested["markov_head_type"] in extra:
        name, rows, columns = extra[nested["markov_head_type"]]
        shapes[f"markov_head.{name}.weight"] = (rows, columns)
        shapes[f"markov_head.{name}.bias"] = (rows,)
    if nested.get("enable_confidence_head"):
        width = H + (r if nested["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _eagle3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name every weight of an EAGLE3 draft with its shape; the embedding is the target's."""
    D, inner, K = config["head_dim"], config["intermediate_size"], config["draft_vocab_size"] or V
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    return {
        "fc.weight": (H, 3 * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, q),
        "midlayer.mlp.gate_proj.weight": (inner, H),
        "midlayer.mlp.up_proj.weight": (inner, H),
        "midlayer.mlp.down_proj.weight": (H, inner),
        "norm.weight": (H,),
        "lm_head.weight": (K, H),
    }


def draw_batch(recipe: Recipe, kept: Array, random: np.random.Generator) -> dict[str, Array]:
    """Draw two rows; one block is dropped, one ends past the sequence, anchors are no candidates.

    (Some anchors are unsupervised, which drawing them by §3.1 would not give: vectors may.)
    """
    # About half of the tokens are kept ones, whatever K is: both kinds of label must occur.
    ids = np.where(
        random.random((B, S)) < 0.5, random.choice(kept, (B, S)), random.integers(0, V, (B, S))
    )
    if recipe.labels == "pruned":
        ids = random.choice(np.setdiff1d(np.arange(V), kept), (B, S))
    mask = (random.random((B, S)) < 0.85).astype(np.float32) * float(recipe.supervised)
    anchors = np.stack([np.sort(random.permutation(S - 2)[:N]) for _ in range(B)])
    anchors[0, -1], anchors[1, -1] = S - 2, 0
    keep = np.ones((B, N), dtype=bool)
    keep[1, -1] = False
    return {
        "batch/input_ids": ids.astype(np.int64),
        "batch/loss_mask": mask,
        "batch/hidden_states": normal(random, (B, S, 2 * H), 1.0),
        "batch/target_last_hidden_states": normal(random, (B, S, H), 1.0),
        "batch/anchor_positions": anchors.astype(np.int64),
        "batch/block_keep_mask": keep,
    }
