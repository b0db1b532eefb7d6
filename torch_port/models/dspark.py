"""The DSpark draft: backbone, Markov head, confidence head, vocabulary buffers."""

from __future__ import annotations

from torch_port.config import DraftConfig
from torch_port.models.block_draft import BlockDraft, FrozenTarget
from torch_port.models.heads import MARKOV_HEADS, ConfidenceHead

__all__ = ["DSparkDraft", "FrozenTarget"]


class DSparkDraft(BlockDraft):
    """A block-parallel draft in the anchor-first layout. Source: spec sheet §5, §6."""

    algorithm = "dspark"

    def build_heads(self, config: DraftConfig) -> None:
        """Create the Markov and the confidence head, as the config asks."""
        head = MARKOV_HEADS.get(config.markov_head_type)
        self.markov_head = head(config) if head else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
