"""The DSpark draft: the backbone with its Markov and confidence heads (sheet §5, §6)."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxdraft.backbone import Backbone
from jaxdraft.config import DSPARK, DraftConfig, check_layout
from jaxdraft.heads import MARKOV_HEADS, ConfidenceHead


class DraftOutput(NamedTuple):
    """What a draft says of every slot: h, z, and c (None without a confidence head)."""

    hidden: Float[Array, "batch blocks γ hidden"]
    logits: Float[Array, "batch blocks γ kept"]
    confidence_logits: Float[Array, "batch blocks γ"] | None


class DSparkDraft(nn.Module):
    """The draft model; the target's embedding and head are inputs, not parameters.

    Attributes:
        config: what to build.
        param_dtype: dtype of freshly initialised parameters; the computation follows the
            parameters and inputs it is given.
    """

    config: DraftConfig
    param_dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        """The backbone's parameters at the top level, `markov_head`, `confidence_head`."""
        config, dtype = self.config, self.param_dtype
        check_layout(config, DSPARK)
        self.backbone = Backbone(config, dtype)
        nn.share_scope(self, self.backbone)
        if config.markov_head_type != "none":
            self.markov_head = MARKOV_HEADS[config.markov_head_type](config, dtype)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config, dtype)

    def __call__(
        self,
        target_states: Float[Array, "batch seq captured"],
        draft_embeddings: Float[Array, "batch blocks γ hidden"],
        anchors: Int[Array, "batch blocks"],
        keep: Bool[Array, "batch blocks"],
        previous: Int[Array, "batch blocks γ"],
        head_rows: Float[Array, "kept hidden"],
        detach_confidence: bool = False,
    ) -> DraftOutput:
        """z = h·U_Kᵀ + Markov bias, and the confidence logits.

        Args:
            target_states: F [batch seq L·H].
            draft_embeddings: E of the draft's input tokens [batch blocks γ hidden].
            anchors: a [batch blocks].
            keep: which blocks are kept [batch blocks].
            previous: previous tokens, target ids [batch blocks γ].
            head_rows: U_K, the kept rows of the target's head [kept hidden].
            detach_confidence: cut the confidence head's inputs from its gradient.

        Returns:
            h [batch blocks γ hidden], z [batch blocks γ kept], c [batch blocks γ] or None.

        Source: sheet §5, §6.
        """
        h = self.backbone(target_states, draft_embeddings, anchors, keep)
        z = jnp.einsum("bnjh,kh->bnjk", h, head_rows)
        e = None
        if self.config.markov_head_type != "none":
            e = self.markov_head.embed(previous)
            z = z + self.markov_head(e, h)
        c = None
        if self.config.enable_confidence_head:
            c = self.confidence_head(h, e, detach_confidence)
        return DraftOutput(hidden=h, logits=z, confidence_logits=c)
