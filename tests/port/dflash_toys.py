"""Toy DFlash drafts, and §12 slot by slot: a loop that shares nothing with the port's objective."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from toys import KEPT, G, S, V, batch, hf_config, toy_map

from torch_port.compute import ComputeConfig
from torch_port.config import DFlashObjectiveConfig, DraftConfig
from torch_port.data.batch import Batch
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.dflash import DFlashDraft
from torch_port.objective.dflash import DFlashDenominators, batch_denominators, reduce_denominators
from torch_port.objective.evaluate import layout_blocks

PLAIN = ComputeConfig(objective="plain", attention="dense")
FUSED = ComputeConfig()
FULL = {"draft_vocab_size": None}
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
OBJECTIVES = {
    "decay": DFlashObjectiveConfig(loss_decay_gamma=3.0),
    "no decay": DFlashObjectiveConfig(),
    "cumulative": DFlashObjectiveConfig(dpace="cumulative"),
    "continuation": DFlashObjectiveConfig(dpace="continuation", beta=0.3),
    "both": DFlashObjectiveConfig(dpace="both"),
}


def dflash_hf(**changes: Any) -> dict[str, Any]:
    """The toys' config.json as a DFlash draft's: it says nothing of heads."""
    raw = hf_config(**{"architectures": ["DFlashDraftModel"], "projector_type": "dflash"} | changes)
    for name in HEADS:
        if name not in changes:
            del raw["dflash_config"][name]
    return raw


def dflash_draft(
    compute: ComputeConfig = FUSED, trainable_head: bool = False, seed: int = 3, **changes: Any
) -> DFlashDraft:
    """A float64 draft with weights large enough that every path matters."""
    config = DraftConfig.from_hf(dflash_hf(**changes))
    model = DFlashDraft(config, compute, trainable_head).double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.4, generator=g)
    if model.prunes_vocabulary and model.vocab_size == V:
        model.install_vocab_mapping(*toy_map())
    return model


def holed_batch() -> Batch:
    """Two rows with labels unsupervised inside blocks, a block past the end, and a dropped one.

    Two labels of three are kept ones, so that slots of one block weigh on each other.
    """
    mask = [[0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0]]
    anchors, keep = [[2, 7, 10], [4, 5, 0]], [[True, True, True], [True, True, False]]
    b = batch(mask, anchors, keep)
    place = torch.arange(S)
    kept = torch.tensor(KEPT)[place % len(KEPT)]
    return replace(b, input_ids=torch.where(place % 3 > 0, kept, 7).repeat(2, 1))  # 7 is pruned


def sums_of(model: DFlashDraft, b: Batch, objective: DFlashObjectiveConfig) -> DFlashDenominators:
    return reduce_denominators(model, batch_denominators(model, b, objective))


def by_hand(
    model: DFlashDraft,
    b: Batch,
    frozen: FrozenTarget,
    objective: DFlashObjectiveConfig,
    detach: bool = True,
) -> tuple[Tensor, dict[str, list[float]]]:
    """§12 and §9 slot by slot, from the hidden states and the sheet alone: (loss, pairs).

    Without `detach` D-PACE's weights carry a gradient, which they must not.
    """
    blocks = layout_blocks(model, b)
    hidden = model(blocks, b.hidden_states, b.anchor_positions, b.block_keep_mask, frozen)
    kept = list(KEPT) if model.prunes_vocabulary else list(range(V))
    beta = objective.beta or 0.0  # without D-PACE there is none, and s is not read
    loss = ce_den = torch.zeros((), dtype=torch.float64)
    pairs = {n: [0.0, 0.0] for n in ("acc", "ce", "l1", "coverage", "mass", "agreement", "tau")}
    slots = {n: [[0.0, 0.0] for _ in range(1, G)] for n in ("ce", "accuracy", "accept")}

    def add(pair: list[float], top: float, bottom: float = 1.0) -> None:
        pair[0], pair[1] = pair[0] + float(top), pair[1] + float(bottom)

    for row in range(len(b.input_ids)):
        for n in range(b.anchor_positions.shape[1]):
            found: dict[int, tuple[Tensor, int, float, float, float, bool]] = {}
            for k in range(1, G):
                at = int(b.anchor_positions[row, n]) + k
                if not (b.block_keep_mask[row, n] and at < S and b.loss_mask[row, at] > 0.5):
                    continue
                z = frozen.lm_head[kept] @ hidden[row, n, k]
                logits = frozen.lm_head @ b.target_last_hidden_states[row, at - 1]
                true = (logits[kept] - logits.logsumexp(0)).exp()
                q, conditional = z.softmax(0), logits[kept].softmax(0)
                alpha = float(torch.minimum(q, true).sum().detach())
                l1 = float((q - conditional).abs().sum().detach())
                agrees = bool(z.argmax() == conditional.argmax())
                found[k] = (z, int(b.input_ids[row, at]), alpha, l1, float(true.sum()), agrees)
            s = [torch.ones((), dtype=torch.float64) for _ in range(G)]
            for k, (z, label, *_) in found.items():
                c = (
                    z.softmax(0)[kept.index(label)]
                    if label in kept
                    else torch.zeros((), dtype=torch.float64)
                )
                s[k] = (1 - beta) * c + beta
            survival, alive = 1.0, 0.0
            for k in range(1, G):
                if k not in found:
                    survival = 0.0
                    continue
                z, label, alpha, l1, mass, agrees = found[k]
                P = torch.stack(s[: k + 1]).prod()
                R = sum(torch.stack(s[: j + 1]).prod() for j in found if j >= k)
                decay = math.exp(-(k - 1) / (objective.loss_decay_gamma or math.inf))
                w = {
                    "none": torch.tensor(decay, dtype=torch.float64),
                    "cumulative": P,
                    "continuation": R / P,
                    "both": R,
                }[objective.dpace]
                w = w.detach() if detach else w
                right = label in kept and int(z.argmax()) == kept.index(label)
                survival *= alpha
                alive += survival
                add(pairs["acc"], right)
                add(pairs["l1"], float(w.detach()) * l1, float(w.detach()))
                add(pairs["coverage"], label in kept)
                add(pairs["mass"], mass)
                add(pairs["agreement"], agrees)
                add(slots["accuracy"][k - 1], right)
                add(slots["accept"][k - 1], alpha)
                if label in kept:
                    ce = -z.log_softmax(0)[kept.index(label)]
                    loss, ce_den = loss + w * ce, ce_den + w
                    add(pairs["ce"], float((w * ce).detach()), float(w.detach()))
                    add(slots["ce"][k - 1], float(ce.detach()))
            if found:
                add(pairs["tau"], 1.0 + alive)
    loss = loss / (ce_den if objective.dpace == "none" else len(b.input_ids))
    for name, per_slot in slots.items():
        for part, place in (("numerator", 0), ("denominator", 1)):
            pairs[f"{name} slots {part}"] = [pair[place] for pair in per_slot]
    return loss, pairs
