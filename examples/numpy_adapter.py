"""DSpark's draft and loss in plain NumPy, as an adapter for `parity judge` (docs/judge.md).

Written from the spec sheet, in float64, a loop per block and per slot; no gradients, no decoding.

Run: parity judge --implementation examples.numpy_adapter:NumpyDraft tests/vectors
"""

import numpy as np

from parity.adapter import DraftOutputs, Objective
from parity.conventions import Conventions


def rms_norm(x, weight, eps):
    """x·rsqrt(mean(x²) + eps)·weight."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x):
    """1/(1 + e⁻ˣ)."""
    return 1 / (1 + np.exp(-x))


def log_softmax(z):
    """log(softmax(z)) along the last axis."""
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def rotate(x, positions, theta):
    """Rotary embedding of [positions, heads, d], halves (i, i + d/2) paired."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class NumpyDraft:
    """One block after the other (§3–§8)."""

    name = "NumPy example"
    conventions = Conventions()  # the sheet's

    def draft_outputs(self, case):
        """Hidden states, logits and confidence logits of every slot."""
        config, head = case.config, case.config["dflash_config"]
        w = {n: v.astype(float) for n, v in case.group("weights").items()}
        batch, target, eps = case.group("batch"), case.group("target"), config["rms_norm_eps"]
        kept = np.flatnonzero(w.get("t2d", np.ones(config["vocab_size"])))
        rows = target["lm_head.weight"].astype(float)[kept]
        context = batch["hidden_states"].astype(float) @ w["fc.weight"].T
        context = rms_norm(context, w["hidden_norm.weight"], eps)
        shape = *batch["anchor_positions"].shape, config["block_size"]
        hidden, confidence = np.zeros((*shape, config["hidden_size"])), np.zeros(shape)
        logits, slots = np.zeros((*shape, len(kept))), np.arange(shape[2])
        for i, n in zip(*np.nonzero(batch["block_keep_mask"]), strict=True):
            x, a = batch["input_ids"][i], int(batch["anchor_positions"][i, n])
            tokens = np.where(slots == 0, x[a], head["mask_token_id"])
            y = target["embed_tokens.weight"].astype(float)[tokens]
            for layer in range(config["num_hidden_layers"]):
                y = self._layer(y, context[i, :a], a, layer, config, w)
            h = hidden[i, n] = rms_norm(y, w["norm.weight"], eps)
            previous = x[np.minimum(a + slots, len(x) - 1)]  # the anchor, then labels
            bias, e = self._markov(h, previous, head, w)
            logits[i, n] = h @ rows.T + bias
            if head["enable_confidence_head"]:
                inputs = np.concatenate([h, e], -1) if head["confidence_head_with_markov"] else h
                confidence[i, n] = inputs @ w["confidence_head.proj.weight"][0]
        if not head["enable_confidence_head"]:
            return DraftOutputs(hidden, logits)
        return DraftOutputs(hidden, logits, confidence + w["confidence_head.proj.bias"])

    def _layer(self, y, context, a, layer, config, weights):
        prefix, eps = f"layers.{layer}.", config["rms_norm_eps"]
        w = {n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)}
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        d, theta, gamma = config["head_dim"], config["rope_theta"], len(y)
        u = rms_norm(y, w["input_layernorm.weight"], eps)
        both = np.concatenate([context, u])
        q = (u @ w["self_attn.q_proj.weight"].T).reshape(gamma, heads, d)
        k = (both @ w["self_attn.k_proj.weight"].T).reshape(-1, groups, d)
        v = (both @ w["self_attn.v_proj.weight"].T).reshape(-1, groups, d)
        at = np.concatenate([np.arange(a), a + np.arange(gamma)])
        q = rotate(rms_norm(q, w["self_attn.q_norm.weight"], eps), at[a:], theta)
        k = rotate(rms_norm(k, w["self_attn.k_norm.weight"], eps), at, theta)
        seen = np.ones((gamma, len(at)), bool)
        if config["layer_types"][layer] == "sliding_attention":
            own, query = np.arange(len(at)) >= a, a + np.arange(gamma)[:, None]
            seen = np.where(own, at <= query, at > query - config["sliding_window"])
        out = np.zeros((gamma, heads, d))
        for i in range(heads):
            g = i * groups // heads
            scores = np.where(seen, q[:, i] @ k[:, g].T / np.sqrt(d), -np.inf)
            out[:, i] = np.exp(log_softmax(scores)) @ v[:, g]
        y = y + out.reshape(gamma, -1) @ w["self_attn.o_proj.weight"].T
        u = rms_norm(y, w["post_attention_layernorm.weight"], eps)
        gate, up = u @ w["mlp.gate_proj.weight"].T, u @ w["mlp.up_proj.weight"].T
        return y + (gate * sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T

    def _markov(self, h, previous, head, w):
        if not head["markov_rank"]:
            return 0.0, None
        e, w2 = w["markov_head.markov_w1.weight"][previous], w["markov_head.markov_w2.weight"].T
        if head["markov_head_type"] == "vanilla":
            return e @ w2, e
        if head["markov_head_type"] == "gated":
            g = np.concatenate([h, e], -1) @ w["markov_head.gate_proj.weight"].T
            return (sigmoid(g + w["markov_head.gate_proj.bias"]) * e) @ w2, e
        state, bias = np.zeros(e.shape[-1]), []
        for slot in range(len(h)):
            joint = w["markov_head.joint_proj.weight"] @ np.concatenate([state, e[slot], h[slot]])
            g, c, o = np.split(joint + w["markov_head.joint_proj.bias"], 3)
            state = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c)
            bias.append(np.tanh(o) @ w2)
        return np.array(bias), e

    def objective(self, case):
        """The loss of §8, its three terms and acceptance, slot by slot."""
        said, batch, given = self.draft_outputs(case), case.group("batch"), case.objective
        U = case.group("target")["lm_head.weight"].astype(float)
        kept = list(np.flatnonzero(case.group("weights").get("t2d", np.ones(len(U)))))
        S, decay = batch["input_ids"].shape[1], given["loss_decay_gamma"] or np.inf
        accept, mask = np.zeros(shape := said.draft_logits.shape[:3]), np.zeros(shape, bool)
        ce = l1 = conf = ce_den = den = 0.0
        for i, n in zip(*np.nonzero(batch["block_keep_mask"]), strict=True):
            for k in range(accept.shape[2]):
                at = int(batch["anchor_positions"][i, n]) + 1 + k
                if at >= S or batch["loss_mask"][i, at] <= 0.5:
                    break  # one unsupervised label ends the block
                mask[i, n, k], weight = True, np.exp(-k / decay)
                log_q = log_softmax(said.draft_logits[i, n, k])
                teacher = U @ batch["target_last_hidden_states"][i, at - 1].astype(float)
                q, p = np.exp(log_q), np.exp(log_softmax(teacher)[kept])
                alpha = accept[i, n, k] = min(1.0, np.minimum(q, p).sum())
                l1 += weight * np.abs(q - np.exp(log_softmax(teacher[kept]))).sum()
                den += weight
                if batch["input_ids"][i, at] in kept:
                    ce -= weight * log_q[kept.index(batch["input_ids"][i, at])]
                    ce_den += weight
                if said.confidence_logits is not None:
                    c = said.confidence_logits[i, n, k]
                    conf += weight * (np.logaddexp(0, c) - alpha * c)
        if den == 0 or (ce_den == 0 and given["ce_alpha"] > 0):
            raise ValueError(f"no {'in-vocabulary' if den else 'supervised'} target tokens")
        loss = (given["l1_alpha"] * l1 + given["confidence_alpha"] * conf) / den
        loss += given["ce_alpha"] * ce / ce_den if given["ce_alpha"] else 0.0
        pairs = {"ce_loss": (ce, ce_den), "l1_loss": (l1, den), "confidence_loss": (conf, den)}
        return Objective(loss, pairs, accept, mask)
