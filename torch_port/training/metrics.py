"""Metric pairs of several steps and ranks: added up on the device, reduced on logging steps only.

Numerators and denominators are summed each for itself: a mean of the ranks' ratios would count a
rank with three supervised tokens as much as one with three thousand (spec sheet §9).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from torch_port.objective.metrics import Pair, add_pairs, ratios
from torch_port.training.step import StepReport

Values = Mapping[str, float | list[float]]


class Ranks(Protocol):
    """What is read here of the ranks that train together; 1 and 0 of a single process."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    @property
    def device(self) -> torch.device:
        """What this process computes on."""


def reduce_pairs(
    pairs: Mapping[str, Pair], extra: Mapping[str, tuple[float, float]], ranks: Ranks
) -> dict[str, Pair]:
    """Sum pairs over the ranks, all in one all-reduce, and bring them to the host in one transfer.

    Arguments: this rank's pairs, scalars or per slot [G], on its device; numbers of the host that
    travel along, (numerator, denominator) by name. Names and shapes are the same on every rank:
    they follow from the config alone, never from the data.
    Returns the summed pairs on the host: float64 when a pair is, else float32. Without any pair
    nothing is sent.

    A collective: every rank calls it.
    """
    if not pairs:
        return {}
    names = sorted(pairs)  # the same order on every rank, however the dictionaries were filled
    tensors = [tensor for name in names for tensor in pairs[name]]
    wide = torch.float64 in {tensor.dtype for tensor in tensors}
    dtype = torch.float64 if wide else torch.float32
    numbers = torch.tensor([extra[name] for name in sorted(extra)], dtype=dtype)
    packed = torch.cat(
        [tensor.detach().reshape(-1).to(dtype) for tensor in tensors]
        + [numbers.reshape(-1).to(tensors[0].device)]
    )
    if ranks.world_size > 1:
        dist.all_reduce(packed)
    sizes = [tensor.numel() for tensor in tensors] + [1, 1] * len(extra)
    parts = iter(packed.cpu().split(sizes))
    reduced = {
        name: (next(parts).view(pairs[name][0].shape), next(parts).view(pairs[name][1].shape))
        for name in names
    }
    return reduced | {name: (next(parts)[0], next(parts)[0]) for name in sorted(extra)}


class MetricWindow:
    """What the steps since the last log record add up to on this rank; nothing here syncs.

    `steps`: how many were added. A step that was not finite has no report and is not among them.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._pairs: dict[str, Pair] = {}
        self.steps = 0
        self._loss = self._tokens = self._seconds = 0.0

    def add(self, report: StepReport, tokens: int, seconds: float) -> None:
        """Add a step: its report, the tokens of this rank's micro-batches, how long it took."""
        self._pairs = add_pairs(self._pairs, report.metrics)
        self.steps += 1
        self._loss += report.loss
        self._tokens += tokens
        self._seconds += seconds

    def reduce(self, ranks: Ranks) -> dict[str, float | list[float]]:
        """Return the steps' values over all ranks and begin anew; {} without steps.

        Every metric as Σ numerators / Σ denominators; `loss`, the mean over steps of the loss over
        all ranks (a rank's own is W times its share, so their mean is the whole, §8);
        `tokens_per_second` of all ranks together; `steps`.

        A collective: every rank calls it.
        """
        extra = {
            "loss": (self._loss, float(self.steps)),
            # Σ tokens / mean seconds: the ranks' clocks differ by a little.
            "tokens_per_second": (self._tokens, self._seconds / ranks.world_size),
        }
        steps, reduced = self.steps, reduce_pairs(self._pairs, extra, ranks)
        self._clear()
        return {**ratios(reduced), "steps": steps} if reduced else {}
