"""What DSpark and DFlash drafts share: backbone, vocabulary buffers, the head of the logits.

Shape suffixes: B batch, S sequence, N blocks, G slots, H hidden, V target ids, K draft ids; `…`
any leading axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_port.blocks import Blocks
from torch_port.compute import ComputeConfig
from torch_port.config import FULL, BlockLayout, DraftConfig
from torch_port.errors import UserError
from torch_port.layout import Layout
from torch_port.models.backbone import Backbone, draw_weights
from torch_port.models.heads import ConfidenceHead, MarkovHead, wide
from torch_port.vocabulary.mapping import DraftVocabMappingMixin


@dataclass(frozen=True)
class FrozenTarget:
    """What a draft borrows of its target: E [V, H] and U [V, H]. Never trained, never sharded."""

    embed_tokens: Tensor
    lm_head: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("embed_tokens", self.embed_tokens), ("lm_head", self.lm_head)):
            if tensor.requires_grad:
                raise UserError(f"the target's {name} requires a gradient; detach it: it is frozen")
        if self.embed_tokens.shape != self.lm_head.shape:
            raise UserError(
                f"the target's embed_tokens {list(self.embed_tokens.shape)} and lm_head "
                f"{list(self.lm_head.shape)} must both be [vocab_size, hidden_size]"
            )


class BlockDraft(DraftVocabMappingMixin, Backbone):
    """A block-parallel draft: γ slots at once over the target's captured states (§5).

    With `trainable_head` it has a K-row output head of its own, `lm_head.weight`, trained with the
    rest (start it from the target's rows: `copy_head`); the teacher keeps the frozen U. That costs
    one more [M, K, H] product per step and K·H parameters, gradients, masters and moments.
    """

    algorithm: str  # the config's projector_type that the class is built for
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def __init__(
        self,
        config: DraftConfig,
        compute: ComputeConfig | None = None,
        trainable_head: bool = False,
    ) -> None:
        super().__init__()
        if config.projector_type != self.algorithm:
            raise UserError(
                f"a {self.algorithm} draft was asked for, but the config's projector_type is "
                f"{config.projector_type!r}, whose blocks are {config.block_layout}: its weights "
                "mean other slots; build the draft that the config names"
            )
        self.config = config
        self.compute = compute or ComputeConfig()
        self.build_backbone(config)
        self.build_heads(config)
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            if trainable_head
            else None
        )
        self.register_vocab_buffers(config.vocab_size, config.draft_vocab_size)
        self.register_state_dict_post_hook(_note_layout)
        self.register_load_state_dict_pre_hook(_refuse_other_layout)

    def build_heads(self, config: DraftConfig) -> None:
        """Create what the draft has beside its backbone: here no head at all."""
        self.markov_head = self.confidence_head = None

    @property
    def block_layout(self) -> BlockLayout:
        """Where the slots of a block predict: with γ, the contract of its checkpoints (§3)."""
        return self.config.block_layout

    def initialise(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch (§5), with the config's initializer_range."""
        draw_weights(self, self.config.initializer_range, generator)

    def forward(
        self,
        blocks: Blocks,
        hidden_states_BSF: Tensor,
        anchors_BN: Tensor,
        keep_BN: Tensor,
        target: FrozenTarget,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return h [B, N, G, H], the backbone's final states of every slot.

        Blockwise attention walks the blocks by the batch's `layout`; without one it is dense.
        Logits are no output: over [B, N, G, K] they are what the memory goes to, so the objective
        asks for them chunk by chunk through `logits`.
        Raises UserError before a vocabulary map is installed, when the draft prunes.
        """
        self.require_vocabulary()
        ids = blocks.input_ids
        embedded = target.embed_tokens.index_select(0, ids.flatten()).view(*ids.shape, -1)
        # A share of 0 would not stop a NaN or Inf of a state that nobody sees (field-note 9).
        seen_BS = _seen_states(self.config, anchors_BN, keep_BN, hidden_states_BSF.shape[1])
        states_BSF = torch.where(seen_BS.unsqueeze(-1), hidden_states_BSF, 0)
        return self.run_backbone(embedded, blocks.position, states_BSF, anchors_BN, keep_BN, layout)

    def output_head(self, lm_head_VH: Tensor) -> Tensor:
        """Return the head of the draft's logits, [K, H]: its own, or the target's kept rows."""
        return self.draft_head(lm_head_VH) if self.lm_head is None else self.lm_head.weight

    def copy_head(self, lm_head_VH: Tensor) -> None:
        """Start the trainable head from the target's kept rows.

        Raises UserError without a trainable head.
        """
        if self.lm_head is None:
            raise UserError(
                "copy_head: this draft borrows the target's head; build it with trainable_head=True"
            )
        with torch.no_grad():
            self.lm_head.weight.copy_(self.draft_head(lm_head_VH))

    def logits(self, hidden: Tensor, e: Tensor | None, draft_head_KH: Tensor) -> Tensor:
        """Return z = h·U_Kᵀ + Markov bias, […, G, K], in float32 or better (Eq. 5).

        Widened before the product: logits rounded to bf16 moved the gradient of h by as much as
        its own size, once a draft was close to its teacher (docs/precision.md).
        """
        base = wide(hidden) @ wide(draft_head_KH).T
        if self.markov_head is None or e is None:
            return base
        return base + self.markov_head.bias(hidden, e)

    def embed_previous(self, previous: Tensor) -> Tensor | None:
        """Return e = W1[previous target id], […, G, r], or None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.embed(previous)

    def confidence(self, hidden: Tensor, e: Tensor | None, detach: bool) -> Tensor | None:
        """Return the confidence logit, […, G], or None without a confidence head.

        `detach` cuts both inputs, h and e (`detach_confidence`).
        """
        if self.confidence_head is None:
            return None
        if detach:
            hidden, e = hidden.detach(), None if e is None else e.detach()
        return self.confidence_head(hidden, e)


def _seen_states(config: DraftConfig, anchors_BN: Tensor, keep_BN: Tensor, sequence: int) -> Tensor:
    """Return which captured states some block sees in some layer, bool [B, S] (§4)."""
    context_S = torch.arange(sequence, device=anchors_BN.device)
    anchor_BN1 = anchors_BN.unsqueeze(-1)
    seen_BNS = keep_BN.unsqueeze(-1) & (context_S < anchor_BN1)
    if config.sliding_window is not None and FULL not in config.layer_types:
        # Slot 0 looks furthest back.
        seen_BNS = seen_BNS & (context_S > anchor_BN1 - config.sliding_window)
    return seen_BNS.any(1)


def _note_layout(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Write the layout into a state dict's metadata: the tensors of two layouts look alike."""
    assert isinstance(module, BlockDraft)
    metadata["block_layout"] = module.block_layout


def _refuse_other_layout(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object
) -> None:
    assert isinstance(module, BlockDraft)
    came = metadata.get("block_layout", module.block_layout)  # files carry it in their config
    if came != module.block_layout:
        raise UserError(
            f"these weights were trained with {came} blocks, but this {module.algorithm} draft "
            f"reads its blocks {module.block_layout}: every slot would predict the wrong token; "
            "build the draft that the checkpoint's config names"
        )
