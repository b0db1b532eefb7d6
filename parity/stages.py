"""The stages of the data flow on both sides: block cells, then per-slot terms, beside the answer.

A case's tensors in the order in which they follow from each other, so that the first one that
diverges can be named: blocks, hidden, draft logits, teacher, acceptance, terms, metrics, loss,
gradients (output side first).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from parity.cases import Array, Case
from parity.checks.eagle3 import port_eagle3, spec_eagle3
from parity.sides import (
    Answer,
    port_answer,
    port_batch,
    port_draft,
    port_objective,
    spec_answer,
    spec_batch,
    spec_draft,
)

# What is compared where: at every slot, or at those that count (the rest is unspecified).
BLOCK_CELLS = (
    "candidates",
    "positions",
    "inputs",
    "eval_mask",
    "labels",
    "draft_labels",
    "previous",
    "teacher_positions",
    "weights",
)
SLOT_STAGES = (
    "hidden",
    "draft_logits",
    "confidence_logits",
    "kept_mass",
    "teacher_top",
    "accept_probability",
    "draft_top",
    "ce",
    "l1",
    "confidence_loss",
    "slot_weights",
)
# Ids of padding may be anything, −1 or V: these are compared where they count.
COUNTED_CELLS = ("draft_labels", "weights")


def is_eagle3(case: Case) -> bool:
    """Whether a case is EAGLE3's, which has no blocks."""
    return "eagle3" in case.extra


def port_staged(case: Case, dtype: str) -> Answer:
    """Answer a case with the port: its tensors, and the terms of every slot in `stages`."""
    return port_eagle3(case, dtype) if is_eagle3(case) else port_answer(case, dtype)


def spec_staged(case: Case, dtype: str) -> Answer:
    """Answer a case with the spec, likewise."""
    if is_eagle3(case):
        return spec_eagle3(case, dtype)
    answer = spec_answer(case, dtype)
    return replace(answer, stages=_spec_stages(case, dtype, answer))


def _windows(case: Case) -> list[int | None]:
    """Return the windows of the layers, each once; None is full attention."""
    sizes = {
        case.config["sliding_window"] if kind == "sliding_attention" else None
        for kind in case.config["layer_types"]
    }
    return sorted(sizes, key=lambda size: -1 if size is None else size)


def _is_dflash(case: Case) -> bool:
    return bool(case.config["dflash_config"]["projector_type"] == "dflash")


# --- The port's block cells -------------------------------------------------------------------


def port_cells(case: Case, dtype: str) -> Answer:
    """Answer with the port's block cells of a case; no draft runs."""
    import torch

    from torch_port.anchors import anchor_candidates
    from torch_port.blocks import slot_weights
    from torch_port.config import BONUS_ANCHOR
    from torch_port.objective.evaluate import layout_blocks

    draft, _ = port_draft(case, dtype)
    arrays = case.group("batch")
    batch = port_batch(arrays, dtype)
    blocks = layout_blocks(draft, batch)
    candidates = np.zeros(arrays["loss_mask"].shape, bool)
    for row, mask in enumerate(arrays["loss_mask"]):
        candidates[row, anchor_candidates(mask)] = True
    first = 1 if draft.block_layout == BONUS_ANCHOR else 0
    decay = getattr(port_objective(case, draft), "loss_decay_gamma", None)
    weights = slot_weights(blocks.evaluated, decay, getattr(torch, dtype), first)
    draft_labels = torch.where(blocks.label_is_kept, blocks.label_draft_id, -100)
    cells = {
        "candidates": candidates,
        "positions": blocks.position.numpy(),
        "inputs": blocks.input_ids.numpy(),
        "eval_mask": blocks.evaluated.numpy(),
        "labels": blocks.label.numpy(),
        "draft_labels": draft_labels.numpy(),
        "previous": blocks.previous.numpy(),
        "teacher_positions": blocks.teacher_position.numpy(),
        "weights": weights.numpy(),
    }
    for window in _windows(case):
        cells |= _port_visibility(arrays, case.config["block_size"], window)
    return Answer(cells=cells)


def _port_visibility(arrays: dict[str, Array], slots: int, window: int | None) -> dict[str, Array]:
    """Read both forms of the port's attention as matrices of what each query sees."""
    import torch

    from torch_port.models.attention import dense_mask
    from torch_port.models.blockwise import band_hidden, first_key

    anchors, keep = arrays["anchor_positions"], arrays["block_keep_mask"]
    rows, blocks = anchors.shape
    seq = arrays["input_ids"].shape[1]
    mask = dense_mask(torch.from_numpy(anchors), torch.from_numpy(keep), seq, slots, window)
    whole = mask[:, 0].numpy().reshape(rows, blocks, slots, seq + blocks * slots)
    # The mask shows a dropped block its own slots, and its output is set to 0 afterwards.
    whole = whole & keep[:, :, None, None]
    walk = np.zeros((rows, blocks, slots, seq + slots), bool)
    hidden = None
    if window is not None:
        hidden = band_hidden(slots, window, torch.device("cpu")).numpy()
    for row, block in zip(*np.nonzero(keep), strict=True):
        a = int(anchors[row, block])
        first = first_key(a, window)
        walk[row, block, :, first:a] = True
        walk[row, block, :, seq:] = True
        if hidden is not None and window is not None:
            walk[row, block, :, first:a] = ~hidden[:, window - 1 - (a - first) : window - 1]
            walk[row, block, :, seq:] = ~hidden[:, window - 1 :]
    return {f"visible, window {window}": whole, f"visible blockwise, window {window}": walk}


# --- The spec's block cells and terms ---------------------------------------------------------


def spec_cells(case: Case, dtype: str) -> Answer:
    """Answer with the spec's block cells of a case; no draft runs."""
    import jax.numpy as jnp

    config, _, _, vocabulary = spec_draft(case, dtype)
    arrays = case.group("batch")
    batch = spec_batch(arrays, dtype)
    decay = case.objective.get("loss_decay_gamma")
    flash = _is_dflash(case)  # whose objective is static, its decay among it
    found = _cells_function()(
        config,
        tuple(_windows(case)),
        decay if flash else None,
        batch,
        jnp.asarray(vocabulary.index),
        None if flash or decay is None else jnp.asarray(decay, dtype),
    )
    cells = {name: np.asarray(value) for name, value in found.items()}
    if flash:
        del cells["previous"]  # no head reads it
    for window in _windows(case):
        context = cells.pop(f"context {window}")
        own = cells.pop(f"own {window}")
        name = f"window {window}"
        cells[f"visible blockwise, {name}"] = np.concatenate([context, own], -1)
        cells[f"visible, {name}"] = _among_all_blocks(context, own)
    return Answer(cells=cells)


def _among_all_blocks(context: Array, own: Array) -> Array:
    """Put each block's own square where it stands among the keys of all blocks."""
    rows, blocks, slots, _ = own.shape
    wide = np.zeros((rows, blocks, slots, blocks, slots), bool)
    for block in range(blocks):
        wide[:, block, :, block] = own[:, block]
    return np.concatenate([context, wide.reshape(rows, blocks, slots, blocks * slots)], -1)


@cache
def _cells_function() -> Any:
    import jax
    import jax.numpy as jnp

    from jaxdraft import blocks, dflash
    from jaxdraft.config import DFLASH

    evaluate = import_module("jaxdraft.evaluate")  # the package has a function of that name

    def cells(
        config: Any, windows: Any, flash_decay: Any, batch: Any, index: Any, decay: Any
    ) -> dict[str, Any]:
        anchors, keep, slots = batch.anchor_positions, batch.block_keep_mask, config.block_size
        dtype = batch.target_last_hidden_states.dtype
        labels: Any
        if config.projector_type == DFLASH:
            labels = dflash.read_labels(config, batch)
            weights = dflash.decayed_weights(labels.mask, flash_decay, dtype)
            previous = labels.tokens
        else:
            labels = evaluate.read_labels(config, batch)
            weights, previous = blocks.weights(labels.mask, decay, dtype), labels.previous
        found = {
            "candidates": blocks.candidates(batch.loss_mask),
            "positions": blocks.positions(anchors, slots),
            "inputs": blocks.draft_tokens(
                batch.input_ids, anchors, keep, slots, config.mask_token_id
            ),
            "eval_mask": labels.mask,
            "labels": labels.tokens,
            "draft_labels": index[jnp.where(labels.mask, labels.tokens, 0)],
            "previous": previous,
            "teacher_positions": labels.teacher_at,
            "weights": weights,
        }
        seq = batch.input_ids.shape[1]
        for window in windows:
            found[f"context {window}"] = blocks.context_visibility(
                anchors, keep, slots, seq, window
            )
            found[f"own {window}"] = blocks.own_visibility(keep, slots, window is not None)
        return found

    return jax.jit(cells, static_argnums=(0, 1, 2))


def _spec_stages(case: Case, dtype: str, answer: Answer) -> dict[str, Array]:
    """Return the spec's terms of every slot, from the logits that its evaluation gave."""
    import jax.numpy as jnp

    from jaxdraft.dflash import DFlashObjective
    from jaxdraft.draft import DraftOutput

    config, _, target, vocabulary = spec_draft(case, dtype)
    confidence = answer.tensors.get("confidence_logits")
    out = DraftOutput(
        hidden=jnp.asarray(answer.tensors["hidden"]),
        logits=jnp.asarray(answer.tensors["draft_logits"]),
        confidence_logits=None if confidence is None else jnp.asarray(confidence),
    )
    objective = DFlashObjective(**case.objective) if _is_dflash(case) else None
    batch = spec_batch(case.group("batch"), dtype)
    found = _stages_function()(config, objective, target, vocabulary, batch, out)
    return {name: np.asarray(value) for name, value in found.items()}


@cache
def _stages_function() -> Any:
    import jax

    from jaxdraft import dflash

    evaluate = import_module("jaxdraft.evaluate")

    def stages(
        config: Any, objective: Any, target: Any, vocabulary: Any, batch: Any, out: Any
    ) -> dict[str, Any]:
        module: Any = evaluate if objective is None else dflash
        labels = module.read_labels(config, batch)
        slots = evaluate.read_slots(
            config, target, vocabulary, batch, labels.mask, labels.tokens, labels.teacher_at, out
        )
        found = {
            "kept_mass": slots.true.sum(-1),
            "teacher_top": slots.true.max(-1),
            "draft_top": jax.nn.softmax(slots.draft_logits, axis=-1).max(-1),
            "ce": jax.numpy.where(slots.terms.kept, slots.terms.ce, 0),
            "l1": slots.terms.l1,
            "confidence_loss": slots.terms.confidence,
        }
        if objective is not None:
            found["slot_weights"] = dflash.position_weights(objective, slots)
        return found

    return jax.jit(stages, static_argnums=(0, 1))


# --- The order of the flow --------------------------------------------------------------------


def gradient_order(names: list[str]) -> list[str]:
    """Sort parameters from the output side to the input: heads, norm, last layer first, fc.

    >>> gradient_order(["fc.weight", "layers.0.mlp.up_proj.weight", "norm.weight"])
    ['norm.weight', 'layers.0.mlp.up_proj.weight', 'fc.weight']
    """
    return sorted(names, key=_depth)


def _depth(name: str) -> tuple[int, int, int, str]:
    outer = ("confidence_head", "markov_head", "lm_head", "norm.")
    inner = ("down_proj", "up_proj", "gate_proj", "post_attention", "o_proj", "self_attn")
    layer = re.match(r"layers\.(\d+)\.|midlayer\.", name)
    if layer:
        place = next((i for i, part in enumerate(inner) if part in name), len(inner))
        return (1, -int(layer.group(1) or 0), place, name)
    if name.startswith(outer):
        return (0, 0, next(i for i, part in enumerate(outer) if name.startswith(part)), name)
    return (2, 0, 0 if name.startswith("hidden_norm") else 1, name)
