"""A toy EAGLE3 draft, and §13 written out with loops: one index, one head, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from toys import KEPT, H, V

from torch_port.config_eagle3 import Eagle3Config
from torch_port.data.batch import Batch
from torch_port.models.dspark import FrozenTarget
from torch_port.models.eagle3 import Eagle3Draft
from torch_port.vocabulary.mapping import buffers_from_kept

S = 9
SIZES = {
    "vocab_size": V,
    "draft_vocab_size": len(KEPT),
    "hidden_size": H,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,  # so small that a few positions turn every pair
    "num_target_layers": 6,
    "target_layer_ids": (0, 2, 4),
}


def eagle3_draft(seed: int = 0, kept: tuple[int, ...] = KEPT, **changes: Any) -> Eagle3Draft:
    """A float64 draft whose every weight matters; norms are no ones."""
    config = Eagle3Config(**(SIZES | {"draft_vocab_size": len(kept)} | changes))
    model = Eagle3Draft(config).double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=g)
    model.install_vocab_mapping(*buffers_from_kept(torch.tensor(kept), config.vocab_size))
    return model


def eagle3_batch(
    loss_mask: list[list[float]] | None = None, length: int = S, width: int = H, seed: int = 2
) -> Batch:
    """Two rows with a hole in the mask; the second is padded."""
    if loss_mask is None:
        loss_mask = [[0, 0, 1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 0, 0]]
    random = np.random.default_rng(seed)
    B = len(loss_mask)
    return Batch(
        input_ids=torch.from_numpy(random.integers(0, V, (B, length))),
        loss_mask=torch.tensor(loss_mask, dtype=torch.float64),
        hidden_states=torch.from_numpy(random.normal(size=(B, length, 3 * width))),
        target_last_hidden_states=torch.from_numpy(random.normal(size=(B, length, width))),
        anchor_positions=torch.zeros(B, 1, dtype=torch.int64),  # not used
        block_keep_mask=torch.zeros(B, 1, dtype=torch.bool),
    )


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).sum() / len(x) + eps).sqrt() * weight


def _turn(x: Tensor, position: int, theta: float) -> Tensor:
    half = len(x) // 2
    out: list[Any] = [None] * len(x)
    for pair in range(half):
        angle = position * theta ** (-2 * pair / len(x))
        first, second = x[pair], x[pair + half]
        out[pair] = first * math.cos(angle) - second * math.sin(angle)
        out[pair + half] = second * math.cos(angle) + first * math.sin(angle)
    return torch.stack(out)


def _step(w: dict[str, Tensor], c: Eagle3Config, step: int, tokens, states, caches) -> list[Tensor]:
    """One training-time-test step of one row; appends this step's keys and values to `caches`."""
    D, group = c.head_dim, c.num_attention_heads // c.num_key_value_heads
    queries, cache = [], []
    for t, (token, state) in enumerate(zip(tokens, states, strict=True)):
        u = torch.cat(
            [
                _norm(token, w["midlayer.input_layernorm.weight"], c.rms_norm_eps),
                _norm(state, w["midlayer.hidden_norm.weight"], c.rms_norm_eps),
            ]
        )
        q, k, v = (w[f"midlayer.self_attn.{name}_proj.weight"] @ u for name in "qkv")
        queries.append([_turn(x, t + step, c.rope_theta) for x in q.split(D)])
        cache.append(([_turn(x, t + step, c.rope_theta) for x in k.split(D)], v.split(D)))
    caches.append(cache)
    after = []
    for t, state in enumerate(states):
        seen = [caches[0][s] for s in range(t + 1)] + [later[t] for later in caches[1:]]
        heads = []
        for a, q in enumerate(queries[t]):
            r = a // group
            weights = torch.stack([q @ k[r] / math.sqrt(D) for k, _ in seen]).softmax(0)
            heads.append(sum(p * v[r] for p, (_, v) in zip(weights, seen, strict=True)))
        state = state + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        u = _norm(state, w["midlayer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = (w[f"midlayer.mlp.{name}_proj.weight"] @ u for name in ("gate", "up"))
        after.append(state + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
    return after


def reference(
    model: Eagle3Draft,
    kept: tuple[int, ...],
    batch: Batch,
    target: FrozenTarget,
    steps: int,
    decay: float,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """Return (loss, leaves whose gradient `backward` fills, per-step sums of the metrics)."""
    w = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    B, length = batch.input_ids.shape
    sums = {name: [0.0] * steps for name in ("ce", "accept", "mass", "hit", "counted", "slots")}
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        states = [w["fc.weight"] @ f for f in batch.hidden_states[b]]
        caches: list[Any] = []
        for i in range(steps):
            nothing = torch.zeros_like(target.embed_tokens[0])
            ids = [int(x) for x in batch.input_ids[b]]
            tokens = [
                target.embed_tokens[ids[t + 1 + i]] if t + 1 + i < length else nothing
                for t in range(length)
            ]
            states = _step(w, model.config, i, tokens, states, caches)
            for t in range(length - 2 - i):
                if batch.loss_mask[b, t + 2 + i] <= 0.5:
                    continue
                z = w["lm_head.weight"] @ _norm(
                    states[t], w["norm.weight"], model.config.rms_norm_eps
                )
                logits = target.lm_head @ batch.target_last_hidden_states[b, t + 1 + i]
                best, inside = int(logits.argmax()), logits[list(kept)]
                true = (inside - logits.logsumexp(0)).exp()
                sums["slots"][i] += 1
                sums["accept"][i] += torch.minimum(z.detach().softmax(0), true).sum().item()
                sums["mass"][i] += true.sum().item()
                sums["hit"][i] += kept[int(z.argmax())] == best
                if best in kept:
                    ce = -(inside.softmax(0) * z.log_softmax(0)).sum()
                    sums["counted"][i] += 1
                    sums["ce"][i] += ce.item()
                    loss = loss + decay**i * ce / (B * length)
    return loss, w, sums
