"""What the rank tests train: one small draft per family and form, rows of unlike lengths, runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dflash_toys import OBJECTIVES, dflash_draft
from eagle3_toys import eagle3_batch, eagle3_draft
from torch import Tensor, nn
from toys import batch, draft, target

from torch_port.compute import ComputeConfig
from torch_port.config import ObjectiveConfig, Settings
from torch_port.config_eagle3 import Eagle3Objective
from torch_port.data.batch import Batch
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.dspark import DSparkDraft
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
from torch_port.training.shards import is_sharded
from torch_port.training.step import accumulate_gradients, training_step

ROWS = 4
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
STEPS = 20
RATES = OptimizerConfig(peak_rate=3e-3, warmup_steps=2, total_steps=STEPS, weight_decay=0.01)


def block_rows(seed: int) -> Batch:
    """Four rows with 30, 12, 5 and 3 labels or so; blocks past the end, dropped ones, holes."""
    mask = [
        [0, 0] + [1] * 10,
        [0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0],
    ]
    anchors = [[2, 5, 8], [3, 7, 0], [5, 8, 9], [3, 0, 0]]
    keep = [[True] * 3, [True, True, False], [True] * 3, [True, False, False]]
    return batch(mask, anchors, keep, seed)


def eagle3_rows(seed: int) -> Batch:
    mask = [
        [0, 0, 1, 1, 0, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0, 0],
        [1] * 9,
    ]
    return eagle3_batch([[float(x) for x in row] for row in mask], seed=seed)


def own_head() -> DSparkDraft:
    """The reference objective, computed again in the backward pass, with a head that is trained."""
    from toys import config, toy_map

    compute = ComputeConfig(objective="plain", attention="dense", recompute="mlp")
    model = DSparkDraft(
        config(markov_head_type="rnn", **ONE_LAYER), compute, trainable_head=True
    ).double()
    model.initialise(torch.Generator().manual_seed(7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.dim() > 1 else 1.0)
    model.install_vocab_mapping(*toy_map())
    return model


def gated() -> DSparkDraft:
    model = draft(draft_vocab_size=None, markov_head_type="gated", **ONE_LAYER)
    model.compute = ComputeConfig(recompute="layer")
    return model


@dataclass(frozen=True)
class Case:
    """How to make a draft (float64), its objective and its rows of a step."""

    draft: Callable[[], Any]
    objective: Settings
    rows: Callable[[int], Batch] = block_rows


CASES = {
    "pruned": Case(draft, ObjectiveConfig(loss_decay_gamma=3.0)),
    "full": Case(gated, ObjectiveConfig(loss_decay_gamma=3.0)),
    "own head": Case(own_head, ObjectiveConfig()),
    "dflash": Case(lambda: dflash_draft(trainable_head=True, **ONE_LAYER), OBJECTIVES["decay"]),
    "eagle3": Case(eagle3_draft, Eagle3Objective(steps=3), eagle3_rows),
}


def take(whole: Batch, rows: slice) -> Batch:
    """Return some rows of a batch that is not laid out."""
    return Batch(**{n: None if x is None else x[rows] for n, x in vars(whole).items()})


def frozen(dtype: torch.dtype) -> FrozenTarget:
    t = target()
    return FrozenTarget(t.embed_tokens.to(dtype), t.lm_head.to(dtype))


def micro_batches(
    case: Case, step: int, rank: int, ranks: int, dtype: torch.dtype, accumulation: int = 1
) -> list[Batch]:
    """Return a rank's share of a step's rows."""
    whole = case.rows(100 + step).to(torch.device("cpu"), dtype)
    own = ROWS // ranks
    mine = take(whole, slice(rank * own, (rank + 1) * own))
    size = own // accumulation
    return [take(mine, slice(i * size, (i + 1) * size)) for i in range(accumulation)]


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be sharded; then every rank must call it."""
    return (tensor.full_tensor() if is_sharded(tensor) else tensor).detach().clone()


def first_gradients(model: nn.Module, batches: Sequence[Batch], case: Case) -> dict[str, Tensor]:
    dtype = batches[0].hidden_states.dtype
    accumulate_gradients(model, batches, frozen(dtype), case.objective)
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = whole(parameter.grad)
        parameter.grad = None
    return found


def train(
    model: nn.Module,
    case: Case,
    rank: int,
    ranks: int,
    dtype: torch.dtype,
    steps: int = STEPS,
    each: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> MasterAdamW:
    """Train a draft on this rank's rows; `each` is called after each step."""
    optimizer = MasterAdamW(model.named_parameters(), RATES, **options)
    for step in range(1, steps + 1):
        batches = micro_batches(case, step, rank, ranks, dtype)
        training_step(model, optimizer, batches, frozen(dtype), case.objective, step)
        each(step)
    return optimizer


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def without_labels(batches: Sequence[Batch]) -> list[Batch]:
    """The same batches with nothing supervised, and no block kept."""
    return [
        replace(
            b,
            loss_mask=torch.zeros_like(b.loss_mask),
            block_keep_mask=torch.zeros_like(b.block_keep_mask),
        )
        for b in batches
    ]


def uneven(name: str, dtype: torch.dtype) -> list[list[Batch]]:
    """Two micro-batches on each of three ranks, with 3, 30 and 0 supervised tokens in all.

    Rank 0's second has none, and rank 2 keeps no block at all.
    """
    if name == "eagle3":
        return [
            [
                eagle3_batch(rows, seed=10 * rank + micro).to(torch.device("cpu"), dtype)
                for micro, rows in enumerate(of_rank)
            ]
            for rank, of_rank in enumerate(UNEVEN_EAGLE3)
        ]
    found = []
    for rank, of_rank in enumerate(UNEVEN):
        batches = []
        for micro, (mask, anchors) in enumerate(of_rank):
            keep = [[any(row)] * len(at) for row, at in zip(mask, anchors, strict=True)]
            b = batch(mask, anchors, keep, 10 * rank + micro)
            batches.append(b.to(torch.device("cpu"), dtype))
        found.append(batches)
    return found


_NONE: list[float] = [0.0] * 12
_FEW: list[float] = [0.0] * 5 + [1.0] * 3 + [0.0] * 4
_MANY: list[float] = [0.0] * 2 + [1.0] * 10
UNEVEN = [
    [([_FEW], [[5, 6]]), ([_NONE], [[0, 0]])],
    [([_MANY, _MANY], [[2, 6], [3, 8]]), ([_MANY], [[2, 4]])],
    [([_NONE], [[0, 0]]), ([_NONE], [[0, 0]])],
]
UNEVEN_EAGLE3 = [
    [[[0.0] * 4 + [1.0] * 3 + [0.0] * 2], [[0.0] * 9]],
    [[[1.0] * 9, [1.0] * 9], [[1.0] * 9, [0.0] * 6 + [1.0] * 3]],
    [[[0.0] * 9], [[0.0] * 9]],
]
