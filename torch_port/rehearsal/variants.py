"""A run with other sizes: what the tables of `rehearse --table` and `fit` compare."""

from __future__ import annotations

from typing import Any

from torch_port.config import Settings
from torch_port.run import RunConfig


def changed(run: RunConfig, section: str, **values: Any) -> RunConfig:
    """Return the run with some settings of one section changed."""
    part = getattr(run, section).model_copy(update=values)
    return run.model_copy(update={section: part})


def with_vocabulary(run: RunConfig, config: Any, size: int) -> tuple[RunConfig, Any]:
    """Return (run, draft config) for a draft vocabulary of `size` ids.

    The objective's buffers grow with it, so that as many slots are worked on at a time.
    """
    buffer = run.compute.objective_buffer_mib * size / config.draft_vocab_size
    other: Settings = config.model_copy(update={"draft_vocab_size": size})
    return changed(run, "compute", objective_buffer_mib=buffer), other


def with_length(run: RunConfig, length: int, anchors: int) -> RunConfig:
    """Return the run with samples of `length` tokens and `anchors` blocks of each."""
    return changed(run, "data", max_length=length, num_anchors=anchors)
