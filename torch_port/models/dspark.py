"""The DSpark draft: backbone, Markov head, confidence head, vocabulary buffers.

Shape suffixes: B batch, S sequence, N blocks, G slots, H hidden, V target ids, K draft ids; `…`
any leading axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_port.blocks import Blocks
from torch_port.compute import ComputeConfig
from torch_port.config import DraftConfig
from torch_port.errors import UserError
from torch_port.layout import Layout
from torch_port.models.backbone import Backbone, RMSNorm
from torch_port.models.heads import MARKOV_HEADS, ConfidenceHead, wide
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


class DSparkDraft(DraftVocabMappingMixin, Backbone):
    """A block-parallel draft in the anchor-first layout. Source: spec sheet §5, §6.

    With `trainable_head` it has a K-row output head of its own, `lm_head.weight`, trained with the
    rest (start it from the target's rows: `copy_head`); the teacher keeps the frozen U. That costs
    one more [M, K, H] product per step and K·H parameters, gradients, masters and moments.
    """

    def __init__(
        self,
        config: DraftConfig,
        compute: ComputeConfig | None = None,
        trainable_head: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.compute = compute or ComputeConfig()
        self.build_backbone(config)
        head = MARKOV_HEADS.get(config.markov_head_type)
        self.markov_head = head(config) if head else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            if trainable_head
            else None
        )
        self.register_vocab_buffers(config.vocab_size, config.draft_vocab_size)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch (§5).

        normal(0, initializer_range) for linear and embedding weights, ones for norms, zeros for
        biases; reproducible from the generator alone.
        """
        deviation = self.config.initializer_range
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.weight.normal_(0, deviation, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
                if isinstance(module, RMSNorm):
                    module.weight.fill_(1)

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
        """
        ids = blocks.input_ids
        embedded = target.embed_tokens.index_select(0, ids.flatten()).view(*ids.shape, -1)
        return self.run_backbone(
            embedded, blocks.position, hidden_states_BSF, anchors_BN, keep_BN, layout
        )

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
