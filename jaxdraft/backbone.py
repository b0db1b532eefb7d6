"""The DFlash backbone (sheet §4, §5), as flax.linen modules.

Shapes: batch B, sequence S, blocks N, slots γ, hidden H; `heads` query heads in groups of
`group` per kv head, `dim` the head size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxdraft import blocks
from jaxdraft.config import SLIDING_ATTENTION, DraftConfig
from jaxdraft.eagle3_config import Eagle3Config


class Visibility(NamedTuple):
    """What the queries of one layer see: context positions, and slots of the own block."""

    context: Bool[Array, "batch blocks γ seq"]
    own: Bool[Array, "batch blocks γ γ"]


def visibility(
    config: DraftConfig,
    layer_type: str,
    anchors: Int[Array, "batch blocks"],
    keep: Bool[Array, "batch blocks"],
    seq: int,
) -> Visibility:
    """The two masks of a layer of the given type.

    Args:
        config: gives γ and the window ω.
        layer_type: an entry of `layer_types`.
        anchors: a [batch blocks].
        keep: which blocks are kept [batch blocks].
        seq: S.

    Returns:
        Masks [batch blocks γ seq] and [batch blocks γ γ].

    Source: sheet §4.
    """
    sliding = layer_type == SLIDING_ATTENTION
    window = config.sliding_window if sliding else None
    return Visibility(
        context=blocks.context_visibility(anchors, keep, config.block_size, seq, window),
        own=blocks.own_visibility(keep, config.block_size, causal=sliding),
    )


def rms_norm(
    x: Float[Array, "*rows dim"], scale: Float[Array, " dim"], eps: float
) -> Float[Array, "*rows dim"]:
    """x · rsqrt(mean(x²) + eps) · scale, over the last axis.

    Args:
        x: [*rows dim].
        scale: the norm's weight [dim].
        eps: `rms_norm_eps`.

    Returns:
        [*rows dim].

    Source: sheet §5.
    """
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps) * jnp.broadcast_to(scale, x.shape)


def rotate(
    x: Float[Array, "*rows heads dim"], at: Int[Array, "*rows"], theta: float
) -> Float[Array, "*rows heads dim"]:
    """Rotary embedding, half-split: pairs (x_i, x_{i+d/2}) turn by position · theta^(−2i/d).

    Args:
        x: queries or keys [*rows heads dim].
        at: their positions [*rows].
        theta: the base, `rope_theta`.

    Returns:
        [*rows heads dim].

    Source: sheet §5.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=x.dtype) / half)
    angle = at.astype(x.dtype)[..., None, None] * frequency.reshape((1,) * (x.ndim - 1) + (half,))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def masked_softmax(
    scores: Float[Array, "*rows keys"], visible: Bool[Array, "*rows keys"]
) -> Float[Array, "*rows keys"]:
    """Softmax over the visible keys; exactly 0 for every key of a row that sees nothing.

    Args:
        scores: [*rows keys].
        visible: which keys the query sees [*rows keys].

    Returns:
        Attention weights [*rows keys].

    Source: sheet §4, last sentence.
    """
    lowest = jnp.finfo(scores.dtype).min
    return jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, lowest), axis=-1), 0)


def attend(
    queries: Float[Array, "batch blocks γ heads dim"],
    context_keys: Float[Array, "batch seq kv_heads dim"],
    context_values: Float[Array, "batch seq kv_heads dim"],
    own_keys: Float[Array, "batch blocks γ kv_heads dim"],
    own_values: Float[Array, "batch blocks γ kv_heads dim"],
    visible: Visibility,
) -> Float[Array, "batch blocks γ heads dim"]:
    """Attention of each block to the context and to itself, scaled by dim^(−½).

    Query head i reads kv head ⌊i·kv_heads/heads⌋.

    Args:
        queries: [batch blocks γ heads dim].
        context_keys: [batch seq kv_heads dim].
        context_values: [batch seq kv_heads dim].
        own_keys: [batch blocks γ kv_heads dim].
        own_values: [batch blocks γ kv_heads dim].
        visible: the layer's two masks.

    Returns:
        [batch blocks γ heads dim]; exactly 0 in dropped blocks.

    Source: sheet §4, §5.
    """
    *rows, heads, dim = queries.shape
    kv_heads, seq = context_keys.shape[2], context_keys.shape[1]
    grouped = queries.reshape(*rows, kv_heads, heads // kv_heads, dim)
    scores = jnp.concatenate(
        [
            jnp.einsum("bnjkgd,bskd->bnjkgs", grouped, context_keys),
            jnp.einsum("bnjkgd,bnikd->bnjkgi", grouped, own_keys),
        ],
        axis=-1,
    )
    sees = jnp.concatenate([visible.context, visible.own], axis=-1)[:, :, :, None, None, :]
    weight = masked_softmax(scores * dim**-0.5, jnp.broadcast_to(sees, scores.shape))
    mixed = jnp.einsum("bnjkgs,bskd->bnjkgd", weight[..., :seq], context_values) + jnp.einsum(
        "bnjkgi,bnikd->bnjkgd", weight[..., seq:], own_values
    )
    return mixed.reshape(queries.shape)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight, which starts at 1."""

    eps: float
    dim: int
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
        """Normalise the last axis [*rows dim] (sheet §5)."""
        scale = self.param("scale", nn.initializers.ones, (self.dim,), self.param_dtype)
        return rms_norm(x, scale, self.eps)


def linear(
    config: DraftConfig | Eagle3Config, out: int, param_dtype: DTypeLike, *, bias: bool = False
) -> nn.Dense:
    """A linear layer, initialised from normal(0, `initializer_range`), its bias from zeros.

    Args:
        config: gives `initializer_range`.
        out: the output size.
        param_dtype: dtype of a fresh weight.
        bias: whether it has one.

    Returns:
        The layer, kernel [in, out].

    Source: sheet §5, initialisation.
    """
    return nn.Dense(
        out,
        use_bias=bias,
        kernel_init=nn.initializers.normal(config.initializer_range),
        param_dtype=param_dtype,
    )


class Attention(nn.Module):
    """The attention of one layer (sheet §4, §5)."""

    config: DraftConfig
    param_dtype: DTypeLike

    def setup(self) -> None:
        """Projections q, k, v, o and the per-head norms of q and k."""
        config, dtype = self.config, self.param_dtype
        dim = config.head_dim
        self.q_proj = linear(config, config.num_attention_heads * dim, dtype)
        self.k_proj = linear(config, config.num_key_value_heads * dim, dtype)
        self.v_proj = linear(config, config.num_key_value_heads * dim, dtype)
        self.o_proj = linear(config, config.hidden_size, dtype)
        self.q_norm = RMSNorm(config.rms_norm_eps, dim, dtype)
        self.k_norm = RMSNorm(config.rms_norm_eps, dim, dtype)

    def __call__(
        self,
        u: Float[Array, "batch blocks γ hidden"],
        context: Float[Array, "batch seq hidden"],
        draft_at: Int[Array, "batch blocks γ"],
        visible: Visibility,
    ) -> Float[Array, "batch blocks γ hidden"]:
        """q from u, k and v from the context and u, then o_proj.

        Args:
            u: the normed residual stream [batch blocks γ hidden].
            context: C [batch seq hidden], never passed through the layer's input norm.
            draft_at: positions of the slots [batch blocks γ].
            visible: the layer's two masks.

        Returns:
            [batch blocks γ hidden].
        """
        theta = self.config.rope_theta
        batch, seq, _ = context.shape
        context_at = jnp.broadcast_to(jnp.arange(seq, dtype=draft_at.dtype)[None, :], (batch, seq))
        attention = attend(
            rotate(self.q_norm(self._heads(self.q_proj(u))), draft_at, theta),
            rotate(self.k_norm(self._heads(self.k_proj(context))), context_at, theta),
            self._heads(self.v_proj(context)),
            rotate(self.k_norm(self._heads(self.k_proj(u))), draft_at, theta),
            self._heads(self.v_proj(u)),
            visible,
        )
        return self.o_proj(attention.reshape(*u.shape[:-1], -1))

    def _heads(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows heads dim"]:
        return x.reshape(*x.shape[:-1], -1, self.config.head_dim)


class MLP(nn.Module):
    """down(silu(gate(u)) ⊙ up(u)) (sheet §5)."""

    config: DraftConfig | Eagle3Config
    param_dtype: DTypeLike

    def setup(self) -> None:
        """The three projections."""
        config, dtype = self.config, self.param_dtype
        self.gate_proj = linear(config, config.intermediate_size, dtype)
        self.up_proj = linear(config, config.intermediate_size, dtype)
        self.down_proj = linear(config, config.hidden_size, dtype)

    def __call__(self, u: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        """Map [*rows hidden] to [*rows hidden]."""
        return self.down_proj(nn.silu(self.gate_proj(u)) * self.up_proj(u))


class DraftLayer(nn.Module):
    """One layer on the draft's residual stream y (sheet §5)."""

    config: DraftConfig
    param_dtype: DTypeLike

    def setup(self) -> None:
        """Two norms, attention and MLP."""
        config, dtype = self.config, self.param_dtype
        self.input_layernorm = RMSNorm(config.rms_norm_eps, config.hidden_size, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.rms_norm_eps, config.hidden_size, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(
        self,
        y: Float[Array, "batch blocks γ hidden"],
        context: Float[Array, "batch seq hidden"],
        draft_at: Int[Array, "batch blocks γ"],
        visible: Visibility,
    ) -> Float[Array, "batch blocks γ hidden"]:
        """y ← y + attention(norm(y), C); y ← y + mlp(norm(y)).

        Args:
            y: the residual stream [batch blocks γ hidden].
            context: C [batch seq hidden].
            draft_at: positions of the slots [batch blocks γ].
            visible: the layer's two masks.

        Returns:
            The residual stream [batch blocks γ hidden].
        """
        y = y + self.self_attn(self.input_layernorm(y), context, draft_at, visible)
        return y + self.mlp(self.post_attention_layernorm(y))


class Backbone(nn.Module):
    """The DFlash backbone: C = RMSNorm(F·Wfcᵀ) once, the layers, the final norm (sheet §5)."""

    config: DraftConfig
    param_dtype: DTypeLike

    def setup(self) -> None:
        """`fc`, `hidden_norm`, `layers_{i}`, `norm`."""
        config, dtype = self.config, self.param_dtype
        self.fc = linear(config, config.hidden_size, dtype)
        self.hidden_norm = RMSNorm(config.rms_norm_eps, config.hidden_size, dtype)
        self.layers = [DraftLayer(config, dtype) for _ in config.layer_types]
        self.norm = RMSNorm(config.rms_norm_eps, config.hidden_size, dtype)

    def __call__(
        self,
        target_states: Float[Array, "batch seq captured"],
        draft_embeddings: Float[Array, "batch blocks γ hidden"],
        anchors: Int[Array, "batch blocks"],
        keep: Bool[Array, "batch blocks"],
    ) -> Float[Array, "batch blocks γ hidden"]:
        """h, from the captured target states and the embedded draft tokens.

        A state that no slot sees in any layer is taken as 0: whatever it holds, NaN too, it is not
        read (a weight of 0 would not stop a NaN).

        Args:
            target_states: F, L layers concatenated [batch seq L·H].
            draft_embeddings: E of the draft's input tokens [batch blocks γ hidden].
            anchors: a [batch blocks].
            keep: which blocks are kept [batch blocks].

        Returns:
            h [batch blocks γ hidden].
        """
        config, seq = self.config, target_states.shape[1]
        masks = [visibility(config, kind, anchors, keep, seq) for kind in config.layer_types]
        seen = jnp.stack([mask.context.any(axis=(1, 2)) for mask in masks]).any(axis=0)
        context = self.hidden_norm(self.fc(jnp.where(seen[..., None], target_states, 0)))
        draft_at = blocks.positions(anchors, config.block_size)
        y = draft_embeddings
        for layer, visible in zip(self.layers, masks, strict=True):
            y = layer(y, context, draft_at, visible)
        return self.norm(y)
