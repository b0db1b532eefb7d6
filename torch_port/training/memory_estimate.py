"""What a rank's device will hold, from a run's numbers alone: state to the byte, the rest as a fit.

Good enough to see before the first step that a run is far from fitting; `torch-port rehearse`
counts every tensor instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_port.models.block_draft import FrozenTarget
from torch_port.run import RunConfig

# Bytes that a layer keeps for the backward pass for each slot, in widths of the hidden state (H),
# the feed-forward part (I), all queries (Q) and all keys (KV): fitted to traced peaks (PeakMemory)
# of the portable kernels over H 128 … 256, I 384 … 768, head widths and sequence lengths.
_ATTENTION = {4: {"H": 10.0, "Q": 13.0, "KV": 25.0}, 2: {"H": 6.0, "Q": 10.0, "KV": 18.0}}
_MLP = {4: {"H": 9.0, "I": 15.0}, 2: {"H": 8.5, "I": 6.7}}
# And beside the layers: for each slot (embedding, objective) and for each captured position.
_SLOT = {4: 27.0, 2: 18.6}
_POSITION = {4: 36.0, 2: 24.0}
MIB = 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank's device.

    `state`: weights, gradients, masters and moments, the frozen target, the draft's head rows; it
    is there for the whole run. `step`: what forward and backward add at their peak, batch included;
    None for a draft that the fit is not of.
    """

    state: int
    step: int | None

    @property
    def peak(self) -> int | None:
        """State and step together."""
        return None if self.step is None else self.state + self.step


def estimate_memory(
    run: RunConfig,
    draft: nn.Module,
    target: FrozenTarget,
    length: int,
    *,
    shards: int = 1,
) -> MemoryEstimate:
    """Return what one rank will hold.

    Arguments: the run; its draft, on any device; the frozen target; S, the longest sample's tokens;
    over how many ranks weights, gradients and optimizer are sharded.
    """
    config: Any = getattr(draft, "config", None)
    # A sharded parameter's numel is that of the whole one.
    trained = [p for p in draft.parameters() if p.requires_grad]
    numbers = sum(p.numel() for p in trained)
    size = trained[0].element_size()
    wide = max(4, size)  # gradients, masters and moments are float32 or better
    masters = wide if size < wide else 0  # a wide weight is its own master
    optimizer = 0 if run.distribution.offload_optimizer else masters + 2 * wide
    state = numbers * (size + wide + optimizer) // shards
    for frozen in (target.embed_tokens, target.lm_head):
        state += frozen.numel() * frozen.element_size()
    if config.draft_vocab_size < config.vocab_size:
        state += config.draft_vocab_size * config.hidden_size * target.lm_head.element_size()
    return MemoryEstimate(state, _step_bytes(run, config, length, size))


def _step_bytes(run: RunConfig, config: Any, S: int, size: int) -> int | None:
    if run.algorithm == "eagle3" or run.compute.attention != "blockwise":
        return None
    B, H, D = run.data.batch_size, config.hidden_size, config.head_dim
    slots, positions = B * run.data.num_anchors * config.block_size, B * S
    widths = {
        "H": H,
        "I": config.intermediate_size,
        "Q": config.num_attention_heads * D,
        "KV": config.num_key_value_heads * D,
    }
    attention, mlp = (_of(fit, widths, size) for fit in (_ATTENTION, _MLP))
    kept = {"none": attention + mlp, "mlp": attention + H * size, "layer": H * size}
    again = {"none": 0.0, "mlp": mlp, "layer": attention + mlp}
    layers = kept[run.compute.recompute] * config.num_hidden_layers + again[run.compute.recompute]
    scale = size / (4 if size >= 4 else 2)
    beside = scale * (_SLOT[min(4, size)] * slots + _POSITION[min(4, size)] * positions) * H
    captured = len(config.target_layer_ids) + 1  # and the final states
    batches = run.data.accumulation * positions * captured * H * size
    buffer = run.compute.objective_buffer_mib * MIB
    return round(layers * slots + beside + batches + buffer)


def _of(fit: dict[int, dict[str, float]], widths: dict[str, int], size: int) -> float:
    """Apply a fit of float32 or bf16; float64 keeps twice what float32 does."""
    scale = size / (4 if size >= 4 else 2)
    return scale * sum(rate * widths[name] for name, rate in fit[min(4, size)].items())
