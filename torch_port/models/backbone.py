"""The DFlash backbone: draft blocks attending to the target's captured states (spec sheet §5).

Shape suffixes: B batch, S sequence, N blocks, G slots, Q = N·G, H hidden, L captured layers,
A heads, R kv heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_port.config import SLIDING, DraftConfig
from torch_port.device import rms_norm, rotary, swiglu
from torch_port.models.attention import dense_mask, draft_attention, rotary_tables


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · weight, computed in float32 or better."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Geometry:
    """Where the queries and keys of a batch stand, and what each layer type may see."""

    query_rotary: tuple[Tensor, Tensor]  # cos, sin [B, 1, Q, D]
    key_rotary: tuple[Tensor, Tensor]  # cos, sin [B, 1, S + Q, D]
    masks: dict[str, Tensor]  # layer type → bool [B, 1, Q, S + Q]
    keep_BQ: Tensor


class Attention(nn.Module):
    """Grouped-query attention whose keys are the shared context and the draft's own residual."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.head_dim = D
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
        source = torch.cat([context_BSH, u_BQH], dim=1)  # context first
        q_BAQD = self.q_norm(self._heads(self.q_proj(u_BQH)))
        k_BRKD = self.k_norm(self._heads(self.k_proj(source)))
        v_BRKD = self._heads(self.v_proj(source))
        out_BAQD = draft_attention(
            rotary(q_BAQD, *geometry.query_rotary),
            rotary(k_BRKD, *geometry.key_rotary),
            v_BRKD,
            geometry.masks[layer_type],
            geometry.keep_BQ,
        )
        return self.o_proj(out_BAQD.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate(u)) ⊙ up(u))."""

    def __init__(self, config: DraftConfig) -> None:
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

    def forward(self, y_BQH: Tensor, context_BSH: Tensor, geometry: Geometry) -> Tensor:
        """Return the residual stream after this layer. The context passes no norm of the layer."""
        u_BQH = self.input_layernorm(y_BQH)
        y_BQH = y_BQH + self.self_attn(u_BQH, context_BSH, geometry, self.layer_type)
        return y_BQH + self.mlp(self.post_attention_layernorm(y_BQH))


class Backbone(nn.Module):
    """C = RMSNorm(F·Wfcᵀ) once, then the layers and a final norm. Mixed into a draft."""

    config: DraftConfig

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
    ) -> Tensor:
        """Return h [B, N, G, H] from the embedded blocks and the captured states [B, S, L·H]."""
        geometry = self._geometry(
            position_BNG, hidden_states_BSF.shape[1], anchors_BN, keep_BN, hidden_states_BSF.dtype
        )
        context_BSH = self.hidden_norm(self.fc(hidden_states_BSF))
        y_BQH = block_embedding_BNGH.flatten(1, 2)
        for layer in self.layers:
            y_BQH = layer(y_BQH, context_BSH, geometry)
        return self.norm(y_BQH).view(block_embedding_BNGH.shape)

    def _geometry(
        self,
        position_BNG: Tensor,
        sequence: int,
        anchors_BN: Tensor,
        keep_BN: Tensor,
        dtype: torch.dtype,
    ) -> Geometry:
        config = self.config
        G = config.block_size
        table = rotary_tables(
            sequence + G, config.head_dim, config.rope_theta, dtype, position_BNG.device
        )
        position_BQ = position_BNG.flatten(1)

        def lookup(values: Tensor) -> tuple[Tensor, Tensor]:
            query = values.index_select(0, position_BQ.flatten())
            query = query.view(*position_BQ.shape, -1).unsqueeze(1)
            context = values[:sequence].expand(len(position_BQ), 1, -1, -1)
            return query, torch.cat([context, query], dim=2)

        (q_cos, k_cos), (q_sin, k_sin) = lookup(table[0]), lookup(table[1])
        masks: dict[str, Tensor] = {
            kind: dense_mask(
                anchors_BN,
                keep_BN,
                sequence,
                G,
                config.sliding_window if kind == SLIDING else None,
            )
            for kind in sorted(set(config.layer_types))
        }
        return Geometry((q_cos, q_sin), (k_cos, k_sin), masks, keep_BN.repeat_interleave(G, dim=1))
