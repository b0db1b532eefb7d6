"""The shapes that are measured, and toy ones for `--quick`; what was published for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ObjectiveShape:
    """Sizes of the objective alone."""

    hidden: int
    draft_vocab: int  # K
    vocab: int  # V
    sequence: int  # S
    anchors: int  # N
    block: int = 16  # γ
    rank: int = 64  # r

    def unpruned(self) -> ObjectiveShape:
        """The same with a target of K rows, all kept."""
        return ObjectiveShape(
            self.hidden,
            self.draft_vocab,
            self.draft_vocab,
            self.sequence,
            self.anchors,
            self.block,
            self.rank,
        )


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call."""

    sequence: int
    anchors: int
    block: int = 16
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64


@dataclass(frozen=True)
class StepShape:
    """Sizes of a whole step. Sequence, anchors and block are the same in both parts."""

    objective: ObjectiveShape
    attention: AttentionShape
    layers: int
    intermediate: int
    captured: int  # target layers whose states are captured, L


OBJECTIVE = {
    "A": ObjectiveShape(512, 8000, 31040, 512, 128),
    "B": ObjectiveShape(1024, 16000, 62080, 1024, 128),
}
ATTENTION = {f"S={S}": AttentionShape(S, S // 4) for S in (512, 1024, 2048)}
STEP = {
    "five layers": StepShape(
        ObjectiveShape(256, 8000, 8000, 1024, 128), AttentionShape(1024, 128), 5, 768, 5
    )
}

QUICK_OBJECTIVE = {"toy": ObjectiveShape(16, 24, 64, 48, 6, 4, 4)}
QUICK_ATTENTION = {"toy": AttentionShape(48, 12, 4, 4, 2, 8)}
QUICK_STEP = {
    "toy": StepShape(
        ObjectiveShape(16, 24, 64, 48, 6, 4, 4), AttentionShape(48, 6, 4, 4, 2, 8), 2, 24, 2
    )
}

# Milliseconds that the project's performance notes give for two cores, the same shapes, float32:
# (case, variant) → as written there. Another machine's time means little; the ratios should hold.
PUBLISHED = {
    ("objective A, pruned", "field"): "1570",
    ("objective A, pruned", "products, computed"): "305",
    ("objective A, pruned", "products, stored"): "229–235",
    ("objective A, unpruned", "field"): "640",
    ("objective A, unpruned", "products"): "229–235",
    ("objective B, pruned", "field"): "5687",
    ("objective B, pruned", "products, computed"): "1802",
    ("objective B, pruned", "products, stored"): "852–1010",
    ("objective B, unpruned", "field"): "2177",
    ("objective B, unpruned", "products"): "852–1010",
    ("attention S=512", "field"): "222",
    ("attention S=512", "field's mask"): "7",
    ("attention S=512", "products"): "21",
    ("attention S=1024", "field"): "924",
    ("attention S=1024", "field's mask"): "39",
    ("attention S=1024", "products"): "89",
    ("attention S=2048", "field"): "3667",
    ("attention S=2048", "field's mask"): "169",
    ("attention S=2048", "products"): "315",
    ("step five layers", "field"): "2140",
}
