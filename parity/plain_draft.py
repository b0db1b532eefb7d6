"""DSpark's and DFlash's draft in NumPy, float64, with the conventions of sliding layers.

For the judge alone: a vector holds what a draft says under the sheet's convention; this is what it
would say under another (sheet §3.2, §4–§6). All blocks of a row at once, one row after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.cases import Array, Case

Weights = Mapping[str, Array]


def draft_outputs(case: Case, window: str, own_block: str) -> dict[str, Array]:
    """Return hidden, draft_logits and confidence_logits (where there is a head), [B, N, γ, …].

    Arguments: `window` and `own_block` as in `parity.conventions.Conventions`.
    """
    w = {name: value.astype(np.float64) for name, value in case.group("weights").items()}
    batch, config = case.group("batch"), case.config
    head = case.config["dflash_config"]
    E = case.tensors["target/embed_tokens.weight"].astype(np.float64)
    U = case.tensors["target/lm_head.weight"].astype(np.float64)
    rows = U[np.flatnonzero(w["t2d"])] if "t2d" in w else U
    states = np.nan_to_num(batch["hidden_states"]).astype(np.float64)
    C = _norm(states @ w["fc.weight"].T, w["hidden_norm.weight"], config)
    found: dict[str, list[Array]] = {}
    for row, a in enumerate(batch["anchor_positions"].astype(int)):
        x = batch["input_ids"][row]
        own = a[:, None] + np.arange(config["block_size"])
        tokens = np.full(own.shape, head["mask_token_id"])
        tokens[:, 0] = x[a]
        y = E[tokens]
        for layer, kind in enumerate(config["layer_types"]):
            sees = _sees(len(x), a, own, config, kind == "sliding_attention", window, own_block)
            y = _layer(y, C[row], own, sees, _of_layer(w, layer), config)
        h = _norm(y, w["norm.weight"], config)
        bias, e = _markov(h, x[np.minimum(own, len(x) - 1)], head, w)
        found.setdefault("hidden", []).append(h)
        found.setdefault("draft_logits", []).append(h @ rows.T + bias)
        if head.get("enable_confidence_head"):
            inputs = np.concatenate([h, e], -1) if head["confidence_head_with_markov"] else h
            c = inputs @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
            found.setdefault("confidence_logits", []).append(c)
    return {name: np.stack(values) for name, values in found.items()}


def _of_layer(w: Weights, layer: int) -> dict[str, Array]:
    prefix = f"layers.{layer}."
    return {n.removeprefix(prefix): v for n, v in w.items() if n.startswith(prefix)}


def _sees(
    S: int,
    a: Array,
    own: Array,
    config: Mapping[str, Any],
    sliding: bool,
    window: str,
    own_block: str,
) -> Array:
    """Return what each slot sees, [N, γ, S + γ]: context, then its own block."""
    N, gamma = own.shape
    s = np.arange(S)
    context = np.broadcast_to(s < a[:, None, None], (N, gamma, S))
    block = np.ones((gamma, gamma), bool)
    if sliding:
        omega = config["sliding_window"]
        first = a[:, None] - omega if window == "anchor" else own - (omega - 1)
        context = context & (s >= first[..., None])
        block = np.tri(gamma, dtype=bool) if own_block == "sheet" else block
    return np.concatenate([context, np.broadcast_to(block, (N, gamma, gamma))], -1)


def _layer(
    y: Array, C: Array, own: Array, sees: Array, w: Weights, config: Mapping[str, Any]
) -> Array:
    N, gamma = own.shape
    u = _norm(y, w["input_layernorm.weight"], config)
    seen = np.concatenate([np.broadcast_to(C, (N, *C.shape)), u], 1)
    at = np.concatenate([np.broadcast_to(np.arange(len(C)), (N, len(C))), own], 1)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def project(name: str, states: Array, count: int) -> Array:
        flat = states @ w[f"self_attn.{name}_proj.weight"].T
        return flat.reshape(N, -1, count, config["head_dim"])

    q = _rotate(_norm(project("q", u, heads), w["self_attn.q_norm.weight"], config), own, config)
    k = _rotate(_norm(project("k", seen, groups), w["self_attn.k_norm.weight"], config), at, config)
    k, v = (np.repeat(t, heads // groups, 2) for t in (k, project("v", seen, groups)))
    scores = np.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(config["head_dim"])
    scores = np.where(sees[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("nhqk,nkhd->nqhd", weights, v).reshape(N, gamma, -1)
    y = y + out @ w["self_attn.o_proj.weight"].T
    u = _norm(y, w["post_attention_layernorm.weight"], config)
    gate = u @ w["mlp.gate_proj.weight"].T
    changed: Array = gate * _sigmoid(gate) * (u @ w["mlp.up_proj.weight"].T)
    result: Array = y + changed @ w["mlp.down_proj.weight"].T
    return result


def _markov(
    h: Array, previous: Array, head: Mapping[str, Any], w: Weights
) -> tuple[Array | float, Array]:
    """Return (logit bias [N, γ, K], e [N, γ, r])."""
    if "markov_head.markov_w1.weight" not in w:
        return 0.0, np.zeros((*previous.shape, 0))
    e = w["markov_head.markov_w1.weight"][previous]
    W2 = w["markov_head.markov_w2.weight"]
    if head["markov_head_type"] == "gated":
        g = np.concatenate([h, e], -1) @ w["markov_head.gate_proj.weight"].T
        return (_sigmoid(g + w["markov_head.gate_proj.bias"]) * e) @ W2.T, e
    if head["markov_head_type"] != "rnn":
        return e @ W2.T, e
    state, told = np.zeros(e[:, 0].shape), []
    for k in range(e.shape[1]):
        joint = np.concatenate([state, e[:, k], h[:, k]], -1)
        joint = joint @ w["markov_head.joint_proj.weight"].T + w["markov_head.joint_proj.bias"]
        g, c, o = np.split(joint, 3, -1)
        state = _sigmoid(g) * state + (1 - _sigmoid(g)) * np.tanh(c)
        told.append(np.tanh(o) @ W2.T)
    return np.stack(told, 1), e


def _norm(x: Array, weight: Array, config: Mapping[str, Any]) -> Array:
    size = np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
    normed: Array = x / size * weight
    return normed


def _rotate(x: Array, at: Array, config: Mapping[str, Any]) -> Array:
    """Rotate [N, positions, heads, d] by positions [N, positions]."""
    half = x.shape[-1] // 2
    angle = (at[..., None] * config["rope_theta"] ** (-np.arange(half) / half))[:, :, None]
    a, b = x[..., :half], x[..., half:]
    turned = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
    return np.concatenate(turned, -1)


def _sigmoid(x: Array) -> Array:
    share: Array = 1 / (1 + np.exp(-x))
    return share
