"""The DFlash backbone: draft blocks attending to the target's captured states (spec sheet §5).

Shape suffixes: B batch, S sequence, N blocks, G slots, Q = N·G, H hidden, L captured layers,
A heads, R kv heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_port.compute import ComputeConfig
from torch_port.config import SLIDING, DraftConfig
from torch_port.config_eagle3 import Eagle3Config
from torch_port.device import rms_norm, rotary, swiglu
from torch_port.layout import Layout
from torch_port.models.attention import dense_mask, draft_attention, rotary_tables, table_length
from torch_port.models.blockwise import blockwise_attention


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · weight, computed in float32 or better."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rms_norm(x, self.weight, self.eps)


def draw_weights(module: nn.Module, deviation: float, generator: torch.Generator) -> None:
    """Draw a draft's weights for training from scratch (§5).

    normal(0, deviation) for linear and embedding weights, ones for norms, zeros for biases;
    reproducible from the generator alone.
    """
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                part.weight.normal_(0, deviation, generator=generator)
            if isinstance(part, nn.Linear) and part.bias is not None:
                part.bias.zero_()
            if isinstance(part, RMSNorm):
                part.weight.fill_(1)


@dataclass(frozen=True)
class Geometry:
    """Where the queries and keys of a batch stand, and what each layer type may see."""

    query_rotary: tuple[Tensor, Tensor]  # cos, sin [B, 1, Q, D]
    context_rotary: tuple[Tensor, Tensor]  # cos, sin [1, 1, S, D]
    keep_BQ: Tensor
    layout: Layout | None  # of blockwise attention
    masks: dict[str, Tensor]  # of dense attention: layer type → bool [B, 1, Q, S + Q]


class Attention(nn.Module):
    """Grouped-query attention whose keys are the shared context and the draft's own residual."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.head_dim, self.window = D, config.sliding_window
        self.q_proj = nn.Linear(H, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def forward(
        self, u_BQH: Tensor, context_BSH: Tensor, geometry: Geometry, layer_type: str
    ) -> Tensor:
        """Return the attention's update of the residual stream, [B, Q, H]."""
        q_BAQD = rotary(self.q_norm(self._heads(self.q_proj(u_BQH))), *geometry.query_rotary)
        context = self._keys(context_BSH, geometry.context_rotary)
        own = self._keys(u_BQH, geometry.query_rotary)
        if geometry.layout is not None:
            window = self.window if layer_type == SLIDING else None
            out_BAQD = blockwise_attention(q_BAQD, context, own, geometry.layout, window)
        else:
            k, v = (torch.cat(both, dim=2) for both in zip(context, own, strict=True))
            out_BAQD = draft_attention(q_BAQD, k, v, geometry.masks[layer_type], geometry.keep_BQ)
        return self.o_proj(out_BAQD.transpose(1, 2).flatten(2))

    def _keys(self, source: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, R, length, D] of the context or of the draft's blocks."""
        k = rotary(self.k_norm(self._heads(self.k_proj(source))), *rotation)
        return k, self._heads(self.v_proj(source))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate(u)) ⊙ up(u))."""

    def __init__(self, config: DraftConfig | Eagle3Config) -> None:
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, inner, bias=False)
        self.up_proj = nn.Linear(H, inner, bias=False)
        self.down_proj = nn.Linear(inner, H, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        """Apply the gated feed-forward to the last axis."""
        return self.down_proj(swiglu(self.gate_proj(u), self.up_proj(u)))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP on the draft's residual stream."""

    def __init__(self, config: DraftConfig, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, y_BQH: Tensor, context_BSH: Tensor, geometry: Geometry, recompute: str
    ) -> Tensor:
        """Return the residual stream after this layer. The context passes no norm of the layer.

        `recompute` "layer" keeps the two inputs alone for the backward pass, "mlp" also all that
        attention keeps, "none" everything.
        """
        if recompute == "layer":
            return _again(self.forward, y_BQH, context_BSH, geometry, "none")
        u_BQH = self.input_layernorm(y_BQH)
        y_BQH = y_BQH + self.self_attn(u_BQH, context_BSH, geometry, self.layer_type)
        return _again(self._feed, y_BQH) if recompute == "mlp" else self._feed(y_BQH)

    def _feed(self, y_BQH: Tensor) -> Tensor:
        return y_BQH + self.mlp(self.post_attention_layernorm(y_BQH))


def _again(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call a function whose inside is computed again in the backward pass; nothing in it draws."""
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


class Backbone(nn.Module):
    """C = RMSNorm(F·Wfcᵀ) once, then the layers and a final norm. Mixed into a draft."""

    config: DraftConfig
    compute: ComputeConfig

    def build_backbone(self, config: DraftConfig) -> None:
        """Create the backbone's parameters under the field's names."""
        H = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(H, config.rms_norm_eps)

    def run_backbone(
        self,
        block_embedding_BNGH: Tensor,
        position_BNG: Tensor,
        hidden_states_BSF: Tensor,
        anchors_BN: Tensor,
        keep_BN: Tensor,
        layout: Layout | None,
    ) -> Tensor:
        """Return h [B, N, G, H] from the embedded blocks and the captured states [B, S, L·H].

        With a `layout` attention is blockwise, without one dense.
        """
        geometry = self._geometry(
            position_BNG,
            hidden_states_BSF.shape[1],
            anchors_BN,
            keep_BN,
            layout,
            hidden_states_BSF.dtype,
        )
        context_BSH = self.hidden_norm(self.fc(hidden_states_BSF))
        y_BQH = block_embedding_BNGH.flatten(1, 2)
        for layer in self.layers:
            y_BQH = layer(y_BQH, context_BSH, geometry, self.compute.recompute)
        # Not a view of the norm's result: FSDP2 hangs a hook on what a module returns.
        return self.norm(y_BQH.view(block_embedding_BNGH.shape))

    def _geometry(
        self,
        position_BNG: Tensor,
        sequence: int,
        anchors_BN: Tensor,
        keep_BN: Tensor,
        layout: Layout | None,
        dtype: torch.dtype,
    ) -> Geometry:
        config = self.config
        G = config.block_size
        tables = rotary_tables(
            table_length(sequence + G),
            config.head_dim,
            config.rope_theta,
            dtype,
            position_BNG.device,
        )
        position_BQ = position_BNG.flatten(1)

        def at_queries(values: Tensor) -> Tensor:
            found = values.index_select(0, position_BQ.flatten())
            return found.view(*position_BQ.shape, -1).unsqueeze(1)

        masks: dict[str, Tensor] = {}
        for kind in sorted(set(config.layer_types)) if layout is None else ():
            window = config.sliding_window if kind == SLIDING else None
            masks[kind] = dense_mask(anchors_BN, keep_BN, sequence, G, window)
        return Geometry(
            query_rotary=(at_queries(tables[0]), at_queries(tables[1])),
            context_rotary=(tables[0][None, None, :sequence], tables[1][None, None, :sequence]),
            keep_BQ=keep_BN.repeat_interleave(G, dim=1),
            layout=layout,
            masks=masks,
        )
