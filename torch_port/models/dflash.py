"""The DFlash draft: the backbone alone, in the bonus-anchor layout (spec sheet §3, §12)."""

from __future__ import annotations

from torch_port.models.block_draft import BlockDraft


class DFlashDraft(BlockDraft):
    """A block-parallel draft without heads: slot k predicts x[a+k], z = h·U_Kᵀ.

    Slot 0 holds the anchor, which serving already has, and is not trained: γ inputs give γ − 1
    predictions. Its weights have the names of a DSpark draft without heads and mean other slots:
    config and state dict both say which layout they are of. Source: spec sheet §5, §12.
    """

    algorithm = "dflash"
