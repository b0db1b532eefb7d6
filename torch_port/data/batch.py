"""Batches: samples padded on the right, with anchors drawn per sample (spec sheet §1, §3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_port.anchors import draw_anchors
from torch_port.config import ANCHOR_FIRST, BlockLayout
from torch_port.errors import UserError
from torch_port.layout import Layout, lay_out

Sample = Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """One micro-batch, [B, S, …]; anchors and keep mask [B, N]."""

    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor
    target_last_hidden_states: Tensor
    anchor_positions: Tensor
    block_keep_mask: Tensor
    target_log_normalizer: Tensor | None = None
    layout: Layout | None = None  # found on the host by `laid_out`; else each step asks for it

    def laid_out(self, block_size: int, block_layout: BlockLayout = ANCHOR_FIRST) -> Batch:
        """Return the batch with its layout for γ = `block_size`. Call on the host, before `to`."""
        where = self.loss_mask, self.anchor_positions, self.block_keep_mask
        return replace(self, layout=lay_out(*where, block_size, block_layout))

    def first(self, rows: int) -> Batch:
        """Return the first rows alone; a layout is found again."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        layout = values.pop("layout")
        cut: dict[str, Any] = {n: None if x is None else x[:rows] for n, x in values.items()}
        batch = Batch(**cut)
        if layout is None:
            return batch
        return batch.laid_out(layout.block_size, layout.block_layout)

    def with_layout(self, block_size: int, block_layout: BlockLayout = ANCHOR_FIRST) -> Batch:
        """Return the batch with a layout; found here, with a sync, if the loader did not.

        Raises UserError when it was laid out for another block size, or another kind of draft.
        """
        if self.layout is None:
            batch = self.laid_out(block_size, block_layout)
            assert batch.layout is not None
            return replace(batch, layout=batch.layout.to(self.input_ids.device))
        if self.layout.block_size != block_size:
            raise UserError(
                f"the batch was laid out for block_size {self.layout.block_size}, but the draft "
                f"has {block_size}; call laid_out({block_size})"
            )
        if self.layout.block_layout != block_layout:
            raise UserError(
                f"the batch was laid out {self.layout.block_layout}, but the draft's blocks are "
                f"{block_layout}; call laid_out({block_size}, {block_layout!r})"
            )
        return self

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Move to a device, states in `dtype`.

        Normaliser and loss mask stay float32 or better: a mask of 0.501 would be 0.5 in bf16, and
        its position no longer supervised.
        """
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Layout):
                moved[field.name] = value.to(device)
                continue
            if value is not None and value.is_floating_point():
                stays_wide = field.name in ("target_log_normalizer", "loss_mask")
                value = value.to(torch.promote_types(dtype, torch.float32) if stays_wide else dtype)
            # From pinned memory the host need not wait for the copy.
            moved[field.name] = None if value is None else value.to(device, non_blocking=True)
        return Batch(**moved)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory, from which devices copy without waiting."""
        pinned: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            pinned[field.name] = value.pin_memory() if isinstance(value, Tensor) else value
        return Batch(**pinned)


def collate(
    samples: Sequence[Sample],
    sample_ids: Sequence[int],
    *,
    num_anchors: int,
    seed: int,
    epoch: int,
    vocab_size: int,
    block_size: int,
    block_layout: BlockLayout = ANCHOR_FIRST,
) -> Batch:
    """Pad samples on the right (mask 0), draw their anchors and lay out their blocks.

    Arguments: feature samples (contracts §5); their ids, which seed the draws; N; V; γ; where the
    slots of the draft's blocks predict.
    Returns a `Batch` on the host.
    Raises UserError for an id that is no row of the target, naming the sample.
    """
    length = max(len(sample["input_ids"]) for sample in samples)
    for sample, sample_id in zip(samples, sample_ids, strict=True):
        ids = sample["input_ids"]
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise UserError(
                f"sample {sample_id}: input_ids span {int(ids.min())} … {int(ids.max())}, but the "
                f"target has vocab_size {vocab_size}; prepare the features with its tokenizer"
            )

    def padded(name: str) -> Tensor:
        rows = [sample[name] for sample in samples]
        out = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
        for index, row in enumerate(rows):
            out[index, : len(row)] = row
        return out

    loss_mask = padded("loss_mask")
    anchors, keep = draw_anchors(loss_mask.numpy(), list(sample_ids), num_anchors, seed, epoch)
    stored = all("target_log_normalizer" in sample for sample in samples)
    batch = Batch(
        input_ids=padded("input_ids"),
        loss_mask=loss_mask,
        hidden_states=padded("hidden_states"),
        target_last_hidden_states=padded("target_last_hidden_states"),
        anchor_positions=torch.from_numpy(anchors),
        block_keep_mask=torch.from_numpy(keep),
        target_log_normalizer=padded("target_log_normalizer") if stored else None,
    )
    return batch.laid_out(block_size, block_layout)


def batch_order(count: int, batch_size: int, seed: int, steps: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (epoch, sample indices [batch_size]) for `steps` steps, reshuffled every epoch.

    Every epoch's order is a function of (seed, epoch); a last incomplete batch is left out, so
    that all batches are alike.
    Raises UserError when there are fewer samples than a batch takes.
    """
    per_epoch = count // batch_size if batch_size > 0 else 0
    if per_epoch < 1:
        raise UserError(
            f"{count} trainable samples do not fill one batch of batch_size {batch_size}; "
            "set batch_size between 1 and their number, or prepare more data"
        )
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = np.random.default_rng([seed, epoch]).permutation(count)
        yield epoch, torch.from_numpy(order[place * batch_size : (place + 1) * batch_size].copy())
