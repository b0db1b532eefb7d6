"""The EAGLE3 draft: one decoder layer on [embedding; fused target states] (spec sheet §13).

Shape suffixes: B batch, S sequence, H hidden, F = 3·H captured states, V target ids, K draft ids,
A query heads, R kv heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_port.compute import ComputeConfig
from torch_port.config_eagle3 import CAPTURED, Eagle3Config
from torch_port.device import rotary
from torch_port.errors import UserError
from torch_port.models.attention import rotary_tables, table_length
from torch_port.models.backbone import MLP, RMSNorm, draw_weights
from torch_port.models.dspark import FrozenTarget
from torch_port.models.training_time_test import KeysValues, training_time_attention
from torch_port.vocabulary.mapping import DraftVocabMappingMixin


class BorrowedEmbedding(nn.Module):
    """The target's embedding, in the draft's state dict but no parameter: it is never trained.

    After `borrow` it shares the target's memory. Before, it is zeros: all-zero means that none was
    borrowed or loaded yet.
    """

    weight: Tensor

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(vocab_size, hidden_size))
        self.register_load_state_dict_pre_hook(_refuse_other_embedding)

    def borrow(self, embed_tokens_VH: Tensor) -> None:
        """Share the target's embedding. Compared once per target, not once per step.

        Raises UserError when the shapes differ, or when a checkpoint brought another embedding: the
        trained layer reads other vectors then.
        """
        if self.weight is not embed_tokens_VH:
            self.refuse_other(embed_tokens_VH)
            self.weight = embed_tokens_VH

    def refuse_other(self, arriving_VH: Tensor) -> None:
        """Raise UserError when another embedding is here already, or the shape is not this one's.

        Values are compared in the dtype that holds fewer of them: a bf16 draft's copy of a float32
        target's embedding is the same embedding.
        """
        if arriving_VH.shape != self.weight.shape:
            raise UserError(
                f"embed_tokens: this draft has {list(self.weight.shape)} (vocab_size, hidden_size),"
                f" but {list(arriving_VH.shape)} came; is it the embedding of another target?"
            )
        if self.weight.is_meta or arriving_VH.is_meta:
            return
        if not bool(self.weight.any()) or not bool(arriving_VH.any()):
            return
        narrow = min(self.weight.dtype, arriving_VH.dtype, key=lambda dtype: dtype.itemsize)
        here, there = (x.to(self.weight.device, narrow) for x in (self.weight, arriving_VH))
        if not torch.equal(here, there):
            raise UserError(
                "embed_tokens differs from the one this draft has: it was trained on another "
                "target's embedding; use the draft with the target of its checkpoint"
            )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows at `ids`, […, H]."""
        return self.weight.index_select(0, ids.flatten()).view(*ids.shape, -1)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Materialised from the meta device: memory that nobody wrote must not look borrowed.
        was_meta = self.weight.is_meta
        result = super()._apply(fn, recurse)
        if was_meta and not self.weight.is_meta:
            self.weight.zero_()
        return result


def _refuse_other_embedding(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object
) -> None:
    # Before anything is copied: the weight may be the target's own memory.
    assert isinstance(module, BorrowedEmbedding)
    arriving = state_dict.get(prefix + "weight")
    if arriving is None:
        return  # load_state_dict itself reports a missing key
    module.refuse_other(arriving)
    # The same one, in fewer bits, or none: what is here stays. It may be the target's own memory,
    # and a copy of zeros or of rounded values would change the target itself.
    if not module.weight.is_meta and bool(module.weight.any()):
        state_dict[prefix + "weight"] = module.weight


class Eagle3Attention(nn.Module):
    """Grouped-query attention on [embedding; state], 2H wide; no per-head norms."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(2 * H, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(2 * H, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(2 * H, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=False)

    def forward(
        self, u_BSF: Tensor, earlier: tuple[KeysValues, ...], rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, KeysValues]:
        """Return (the update of the state [B, S, H]; this step's keys and values)."""
        q, k, v = (
            proj(u_BSF).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        own = rotary(k, *rotation), v
        out_BASD = training_time_attention(rotary(q, *rotation), (*earlier, own))
        return self.o_proj(out_BASD.transpose(1, 2).flatten(2)), own


class MidLayer(nn.Module):
    """The one decoder layer; residuals run along the state, which no norm passes."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = MLP(config)

    def forward(
        self,
        embedded_BSH: Tensor,
        state_BSH: Tensor,
        earlier: tuple[KeysValues, ...],
        rotation: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, KeysValues]:
        """Return (the state after this step; this step's keys and values)."""
        u_BSF = torch.cat([self.input_layernorm(embedded_BSH), self.hidden_norm(state_BSH)], -1)
        update_BSH, own = self.self_attn(u_BSF, earlier, rotation)
        state_BSH = state_BSH + update_BSH
        return state_BSH + self.mlp(self.post_attention_layernorm(state_BSH)), own


class Eagle3Draft(DraftVocabMappingMixin, nn.Module):
    """An EAGLE3 draft with a K-row head of its own. Source: spec sheet §13, contracts §4.

    Of `compute`, `recompute` counts ("mlp" as "layer": each step whole); the rest has one form.
    """

    algorithm = "eagle3"
    keeps_vocab_buffers_when_unpruned: ClassVar[bool] = True

    def __init__(self, config: Eagle3Config, compute: ComputeConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.compute = compute or ComputeConfig()
        H = config.hidden_size
        self.fc = nn.Linear(CAPTURED * H, H, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.embed_tokens = BorrowedEmbedding(config.vocab_size, H)
        self.register_vocab_buffers(config.vocab_size, config.draft_vocab_size)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch (§5); the head too (or: `copy_head`)."""
        draw_weights(self, self.config.initializer_range, generator)

    def copy_head(self, lm_head_VH: Tensor) -> None:
        """Start the head from the target's kept rows. Raises UserError before a map is there."""
        with torch.no_grad():
            self.lm_head.weight.copy_(self.draft_head(lm_head_VH))

    def forward(
        self, input_ids_BS: Tensor, hidden_states_BSF: Tensor, target: FrozenTarget, steps: int
    ) -> list[Tensor]:
        """Return RMSNorm(state) of each training-time-test step, `steps` tensors [B, S, H].

        Arguments: token ids (illegal ones, of padding, are clamped into the vocabulary); the three
        captured states side by side [B, S, 3H]; the target, whose embedding is borrowed.
        Index t of step i reads x[t + 1 + i] and the state of step i − 1 at t, and stands at rotary
        position t + i. Logits are no output: the objective asks for them chunk by chunk.
        Raises UserError before a vocabulary map is installed.
        """
        self.require_vocabulary()
        self.embed_tokens.borrow(target.embed_tokens)
        config, S = self.config, input_ids_BS.shape[1]
        ids = F.pad(input_ids_BS.clamp(0, config.vocab_size - 1), (0, steps))
        embedded = self.embed_tokens(ids)  # beyond the sequence: any row, nothing there counts
        tables = rotary_tables(
            table_length(S + steps),
            config.head_dim,
            config.rope_theta,
            hidden_states_BSF.dtype,
            hidden_states_BSF.device,
        )
        state_BSH = self.fc(hidden_states_BSF)
        earlier: tuple[KeysValues, ...] = ()
        outputs = []
        for step in range(steps):
            cos, sin = (table[None, None, step : step + S] for table in tables)
            token_BSH = embedded[:, step + 1 : step + 1 + S]
            state_BSH, own = self._layer(token_BSH, state_BSH, earlier, (cos, sin))
            earlier = (*earlier, own)
            outputs.append(self.norm(state_BSH))
        return outputs

    def _layer(
        self,
        token_BSH: Tensor,
        state_BSH: Tensor,
        earlier: tuple[KeysValues, ...],
        rotation: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, KeysValues]:
        inputs = token_BSH, state_BSH, earlier, rotation
        if self.compute.recompute == "none":
            result: tuple[Tensor, KeysValues] = self.midlayer(*inputs)
        else:
            result = checkpoint(
                self.midlayer, *inputs, use_reentrant=False, preserve_rng_state=False
            )
        return result
