"""Capture of a target's states: chosen layers, final states and the log normaliser.

Shape suffixes: B batch, S tokens, L captured layers, H hidden size, V rows of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_port.config import target_layer_problem
from torch_port.data.conversations import DataError
from torch_port.objective.teacher import log_normalizer

# Batches among which samples are sorted by length; so many samples' states are held at a time.
_WINDOW_BATCHES = 8


@dataclass(frozen=True)
class CapturedStates:
    """States of one sample: `hidden_states` [S, L·H], `target_last_hidden_states` [S, H] after
    the final norm (both in the target's dtype), `target_log_normalizer` float32 [S].
    """

    hidden_states: Tensor
    target_last_hidden_states: Tensor
    target_log_normalizer: Tensor


def check_target_layer_ids(target_layer_ids: Sequence[int], num_layers: int) -> None:
    """Refuse layer ids that name no servable state.

    Args:
        target_layer_ids: 0-based decoder layers, in the order of concatenation.
        num_layers: decoder layers of the target.

    Raises:
        DataError: none, a duplicate, a negative or too large id, or the last layer (transformers
            hands its output out normalised, so a server could not supply it).

    Source: contracts §4; field note 25.
    """
    problem = target_layer_problem(target_layer_ids, num_layers)
    if problem is not None:
        raise DataError(f"target_layer_ids: {problem}")


def capture(
    model: nn.Module,
    input_ids: Sequence[Tensor],
    target_layer_ids: Sequence[int],
    *,
    batch_size: int = 16,
    head_rows: int = 2048,
) -> Iterator[CapturedStates]:
    """Run a causal LM over samples and yield the states that a draft trains on.

    Layer id i stands for the *output* of decoder layer i, 0-based (`hidden_states[i + 1]` in
    transformers). Batches are padded on the right, which a causal model's earlier positions do
    not see, and the padding is cut off again. Within a window of some batches, samples of like
    length share a batch.

    Args:
        model: a transformers causal LM (`model.model.layers`, `model.model.norm`,
            `model.lm_head` without bias), in evaluation mode.
        input_ids: one int64 `[S]` tensor per sample.
        target_layer_ids: layers to concatenate, in this order.
        batch_size: samples of one forward pass.
        head_rows: rows of the head in one slice of the log normaliser.

    Yields:
        One `CapturedStates` per sample, in the order of `input_ids`.

    Raises:
        DataError: unusable `target_layer_ids`.

    Source: contracts §4 and §5.
    """
    decoder: Any = model.model
    check_target_layer_ids(target_layer_ids, len(decoder.layers))
    window = batch_size * _WINDOW_BATCHES
    for begin in range(0, len(input_ids), window):
        rows = range(begin, min(begin + window, len(input_ids)))
        by_length = sorted(rows, key=lambda row: len(input_ids[row]))
        done: dict[int, CapturedStates] = {}
        for first in range(0, len(by_length), batch_size):
            batch = by_length[first : first + batch_size]
            states = _capture_batch(
                model, [input_ids[row] for row in batch], target_layer_ids, head_rows
            )
            done.update(zip(batch, states, strict=True))
        for row in rows:
            yield done[row]


@torch.no_grad()
def _capture_batch(
    model: Any, batch: Sequence[Tensor], target_layer_ids: Sequence[int], head_rows: int
) -> list[CapturedStates]:
    """States of one right-padded batch, without the padding."""
    ids_BS = nn.utils.rnn.pad_sequence(list(batch), batch_first=True)
    with _layer_outputs(model.model.layers, target_layer_ids) as outputs:
        final_BSH = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
    states_BSLH = torch.cat([outputs[i] for i in target_layer_ids], dim=-1)
    head_VH = model.lm_head.weight
    return [
        CapturedStates(
            # Clones: a view would keep the whole padded batch alive.
            hidden_states=states_SLH[: len(ids_S)].clone(),
            target_last_hidden_states=final_SH[: len(ids_S)].clone(),
            target_log_normalizer=log_normalizer(final_SH[: len(ids_S)], head_VH, head_rows),
        )
        for ids_S, states_SLH, final_SH in zip(batch, states_BSLH, final_BSH, strict=True)
    ]


@contextmanager
def _layer_outputs(layers: nn.ModuleList, ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of some layers while the block runs."""
    outputs: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # Layers return a tensor, or in older models a tuple that begins with it.
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i].register_forward_hook(keep(i)) for i in ids]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
