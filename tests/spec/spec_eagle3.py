"""Toys of EAGLE3 (the field notes' map), and §13 written once more, slot by slot in NumPy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from spec_toys import HIDDEN, KEPT, V

from jaxdraft import Eagle3Batch, Eagle3Config, Eagle3Draft, Target

SEQ, STEPS = 7, 3
HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": V,
    "draft_vocab_size": len(KEPT),
    "hidden_size": HIDDEN,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "num_target_layers": 6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "use_aux_hidden_state": True,
    },
}


def config(**changes: Any) -> Eagle3Config:
    """The toy with fields changed at the top level."""
    return Eagle3Config.from_hf({**HF, **changes})


def params(of: Eagle3Config, seed: int = 0) -> Any:
    """Random parameters, large enough that every one of them shows in the loss."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(size=shape.shape)
        return jnp.asarray(
            1 + 0.3 * values if path[-1].key == "scale" else values / math.sqrt(shape.shape[0])
        )

    model, width = Eagle3Draft(of, param_dtype=jnp.float64), of.hidden_size
    shapes = jax.eval_shape(
        model.init,
        jax.random.key(0),
        jax.ShapeDtypeStruct((1, SEQ, 3 * width), jnp.float64),
        jax.ShapeDtypeStruct((1, 1, SEQ, width), jnp.float64),
    )["params"]
    return jax.tree_util.tree_map_with_path(draw, shapes)


def batch(seed: int = 2, **changes: Any) -> Eagle3Batch:
    """Two rows of 7: one with a hole in its mask, one padded behind position 4."""
    rng = np.random.default_rng(seed)
    fields = {
        "input_ids": jnp.asarray(rng.integers(0, V, (2, SEQ))),
        "loss_mask": jnp.asarray([[0, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0]], dtype=float),
        "hidden_states": jnp.asarray(rng.normal(size=(2, SEQ, 3 * HIDDEN))),
        "target_last_hidden_states": jnp.asarray(rng.normal(size=(2, SEQ, HIDDEN))),
    }
    return Eagle3Batch(**{**fields, **changes})


def named(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a parameter tree by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(entry.key for entry in path): np.asarray(leaf) for path, leaf in leaves}


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt((x * x).mean() + eps) * scale


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def turned(heads: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Each pair (x_i, x_{i+d/2}) as a complex number, times exp(i·position·theta^(−2i/d))."""
    half = heads.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    z = (heads[:, :half] + 1j * heads[:, half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)


def one_row(of: Eagle3Config, w: dict[str, np.ndarray], E: np.ndarray, x: Any, F: Any, n: int):
    """h and logits of every (step, index) whose token is in the sequence."""
    eps, dim, S = of.rms_norm_eps, of.head_dim, len(x)
    state = {t: F[t] @ w["fc/kernel"] for t in range(S)}
    keys, values, hidden, logits = {}, {}, {}, {}
    for i in range(n):
        there, queries = [t for t in range(S) if t + 1 + i < S], {}
        for t in there:
            token = norm(E[x[t + 1 + i]], w["midlayer/input_layernorm/scale"], eps)
            u = np.concatenate([token, norm(state[t], w["midlayer/hidden_norm/scale"], eps)])
            q, k, v = (
                (u @ w[f"midlayer/self_attn/{name}_proj/kernel"]).reshape(-1, dim) for name in "qkv"
            )
            queries[t], keys[i, t] = (
                turned(q, t + i, of.rope_theta),
                turned(k, t + i, of.rope_theta),
            )
            values[i, t] = v
        for t in there:
            seen = [(0, s) for s in range(t + 1)] + [(j, t) for j in range(1, i + 1)]
            mixed = []
            for head, q in enumerate(queries[t]):
                kv = head * of.num_key_value_heads // of.num_attention_heads
                weight = softmax(np.array([q @ keys[at][kv] for at in seen]) / math.sqrt(dim))
                mixed.append(sum(p * values[at][kv] for p, at in zip(weight, seen, strict=True)))
            y = state[t] + np.concatenate(mixed) @ w["midlayer/self_attn/o_proj/kernel"]
            u = norm(y, w["midlayer/post_attention_layernorm/scale"], eps)
            gate, up = (u @ w[f"midlayer/mlp/{name}_proj/kernel"] for name in ("gate", "up"))
            y = y + (gate / (1 + np.exp(-gate)) * up) @ w["midlayer/mlp/down_proj/kernel"]
            state[t] = y  # each index is read once a step, before this
            hidden[i, t] = norm(y, w["norm/scale"], eps)
            logits[i, t] = hidden[i, t] @ w["lm_head/kernel"]
    return hidden, logits


def in_loops(
    of: Eagle3Config, n: int, tree: Any, target: Target, kept: list[int], given: Eagle3Batch
) -> dict[str, Any]:
    """§13 from raw arrays: loss, rows per step, and h, logits and α of each supervised slot."""
    w, E, U = named(tree), np.asarray(target.embed_tokens), np.asarray(target.lm_head)
    x, m, F, T = (np.asarray(array) for array in given)
    B, S = x.shape
    loss, accept, hits, inside, on = np.zeros((5, n))
    slots = {}
    for b in range(B):
        hidden, logits = one_row(of, w, E, x[b], F[b], n)
        for i in range(n):
            for t in range(S):
                label = t + 2 + i
                if label >= S or m[b, label] <= 0.5:
                    continue
                full = softmax(U @ T[b, label - 1])
                p, q = full[kept], softmax(logits[i, t])
                on[i] += 1
                alpha = np.minimum(p, q).sum()
                accept[i] += alpha
                slots[b, i, t] = hidden[i, t], logits[i, t], alpha
                choice = int(full.argmax())
                if choice in kept:
                    inside[i] += 1
                    loss[i] -= (p / p.sum() * np.log(q)).sum()
                    hits[i] += kept[int(q.argmax())] == choice
    positions = np.full(n, B * S)
    return {
        "loss": sum(0.8**i * loss[i] / (B * S) for i in range(n)),
        "metrics": {
            "loss_step": (loss, positions),
            "accept_step": (accept, on),
            "accuracy_step": (hits, on),
            "in_vocabulary_step": (inside, on),
        },
        "slots": slots,
    }
