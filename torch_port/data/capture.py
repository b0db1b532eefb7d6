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
    batch_tokens: int | None = None,
    head_rows: int = 2048,
) -> Iterator[CapturedStates]:
    """Run a causal LM over samples and yield the states that a draft trains on.

    Layer id i stands for the *output* of decoder layer i, 0-based (`hidden_states[i + 1]` in
    transformers). Batches are padded on the right, which a causal model's earlier positions do
    not see, and the padding is cut off again. Within a window of some batches, samples of like
    length share a batch.

    Args:
        model: a transformers causal LM whose head has no bias, in evaluation mode; batches go to
            its device, and what is yielded comes from there.
        input_ids: one int64 `[S]` tensor per sample.
        target_layer_ids: layers to concatenate, in this order.
        batch_size: samples of one forward pass.
        batch_tokens: tokens of one forward pass at most, padding included, instead of a number of
            samples; a longer sample goes alone.
        head_rows: rows of the head in one slice of the log normaliser.

    Yields:
        One `CapturedStates` per sample, in the order of `input_ids`.

    Raises:
        DataError: unusable `target_layer_ids`.

    Source: contracts §4 and §5.
    """
    parts = parts_of(model)
    check_target_layer_ids(target_layer_ids, len(parts.layers))
    lengths = [len(one) for one in input_ids]
    for window in _windows(lengths, batch_size, batch_tokens):
        done: dict[int, CapturedStates] = {}
        for batch in window:
            states = _capture_batch(
                parts, [input_ids[row] for row in batch], target_layer_ids, head_rows
            )
            done.update(zip(batch, states, strict=True))
        for row in sorted(done):
            yield done[row]


def _windows(
    lengths: Sequence[int], batch_size: int, batch_tokens: int | None
) -> Iterator[list[list[int]]]:
    """Yield the rows of some batches: consecutive ones, of which like lengths share a batch."""
    budget = batch_size if batch_tokens is None else batch_tokens
    begin = 0
    while begin < len(lengths):
        end, held = begin, 0
        while end < len(lengths) and held < budget * _WINDOW_BATCHES:
            held += 1 if batch_tokens is None else lengths[end]
            end += 1
        batches: list[list[int]] = []
        for row in sorted(range(begin, end), key=lambda row: lengths[row]):
            # Rows come by length, so that the newest is as long as its whole batch is padded to.
            size = 1 if batch_tokens is None else lengths[row]
            if batches and (len(batches[-1]) + 1) * size <= budget:
                batches[-1].append(row)
            else:
                batches.append([row])
        yield batches
        begin = end


@dataclass(frozen=True)
class TargetParts:
    """Of a causal LM: the decoder that is run, its layers in order, and the head U [V, H]."""

    decoder: Any
    layers: nn.ModuleList
    head_VH: Tensor


def parts_of(model: nn.Module) -> TargetParts:
    """Find a causal LM's decoder, its layers and its head.

    Raises:
        DataError: they cannot be told, or the head has a bias, which a draft would not have.
    """
    whole: Any = model
    decoder = whole.get_decoder() if hasattr(model, "get_decoder") else whole.model
    head = (
        whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else whole.lm_head
    )
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    layers = getattr(decoder, "layers", lists[0] if len(lists) == 1 else None)
    name = type(model).__name__
    if not isinstance(layers, nn.ModuleList):
        raise DataError(
            f"target {name}: its decoder layers cannot be told apart (found {len(lists)} lists of "
            "modules). Use a decoder-only causal LM."
        )
    if head is None or getattr(head, "bias", None) is not None:
        found = "none" if head is None else "one with a bias"
        raise DataError(
            f"target {name}: expected a head without bias, found {found}. A draft borrows the "
            "head's rows alone: use another target."
        )
    return TargetParts(decoder, layers, head.weight)


@torch.no_grad()
def _capture_batch(
    parts: TargetParts, batch: Sequence[Tensor], target_layer_ids: Sequence[int], head_rows: int
) -> list[CapturedStates]:
    """States of one right-padded batch, without the padding."""
    ids_BS = nn.utils.rnn.pad_sequence(list(batch), batch_first=True).to(parts.head_VH.device)
    with _layer_outputs(parts.layers, target_layer_ids) as outputs:
        final_BSH = parts.decoder(input_ids=ids_BS, use_cache=False).last_hidden_state
    states_BSLH = torch.cat([outputs[i] for i in target_layer_ids], dim=-1)
    lengths = [len(ids_S) for ids_S in batch]
    # One pass over the head's rows for the whole batch.
    final_TH = torch.cat([row[:length] for row, length in zip(final_BSH, lengths, strict=True)])
    normalizers = log_normalizer(final_TH, parts.head_VH, head_rows).split(lengths)
    return [
        CapturedStates(
            # Clones: a view would keep the whole padded batch alive.
            hidden_states=states_SLH[:length].clone(),
            target_last_hidden_states=final_SH.clone(),
            target_log_normalizer=normalizer_S.clone(),
        )
        for length, states_SLH, final_SH, normalizer_S in zip(
            lengths, states_BSLH, final_TH.split(lengths), normalizers, strict=True
        )
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
