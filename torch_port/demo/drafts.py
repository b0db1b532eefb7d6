"""The demo's two drafts, pruned and unpruned: same steps, seed and batches."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from torch_port.config import FULL, DraftConfig, ObjectiveConfig
from torch_port.data.batch import Batch, batch_order, collate
from torch_port.data.features import FeatureDirectory
from torch_port.demo.prepare import Prepared
from torch_port.demo.recipe import Recipe
from torch_port.evaluation import evaluate
from torch_port.memory import PeakMemory
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.metrics import ratios
from torch_port.progress import stage
from torch_port.training.loop import train
from torch_port.training.optimizer import OptimizerConfig
from torch_port.training.step import StepReport, accumulate_gradients

HELDOUT_EPOCH = 0  # anchors of the held-out set: drawn once, so that all evaluations compare


@dataclass(frozen=True)
class DraftRun:
    """One draft's training: the draft before and after, and its part of metrics.json."""

    untrained: DSparkDraft
    trained: DSparkDraft
    metrics: dict[str, Any]


def draft_config(prepared: Prepared, recipe: Recipe, draft_vocab_size: int) -> DraftConfig:
    """Describe a draft that borrows the sizes of the demo's target."""
    target = prepared.target_config
    return DraftConfig(
        vocab_size=prepared.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=target["hidden_size"],
        intermediate_size=target["intermediate_size"],
        num_hidden_layers=recipe.draft_layers,
        num_attention_heads=target["num_attention_heads"],
        num_key_value_heads=target["num_key_value_heads"],
        head_dim=target["head_dim"],
        rms_norm_eps=float(target["rms_norm_eps"]),
        rope_theta=float(recipe.rope_theta),
        layer_types=(FULL,) * recipe.draft_layers,
        sliding_window=None,
        block_size=recipe.block_size,
        num_target_layers=target["num_hidden_layers"],
        target_layer_ids=recipe.target_layer_ids,
        mask_token_id=prepared.special.mask,
        markov_rank=recipe.markov_rank,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )


def objective_config(recipe: Recipe) -> ObjectiveConfig:
    """Return the sheet's default weights with a decay of half a block."""
    return ObjectiveConfig(loss_decay_gamma=recipe.block_size / 2)


def optimizer_config(recipe: Recipe) -> OptimizerConfig:
    """Return the recipe's warm-up, cosine and clip."""
    return OptimizerConfig(
        peak_rate=recipe.draft_lr,
        warmup_steps=recipe.draft_warmup,
        total_steps=recipe.draft_steps,
        max_grad_norm=1.0,
    )


def new_draft(config: DraftConfig, seed: int, buffers: tuple[Tensor, Tensor] | None) -> DSparkDraft:
    """Build a draft from the seed and install its vocabulary map, if it prunes."""
    draft = DSparkDraft(config)
    draft.initialise(torch.Generator().manual_seed(seed))
    if buffers is not None:
        draft.install_vocab_mapping(*buffers)
    return draft


def training_batches(prepared: Prepared, recipe: Recipe, steps: int) -> Iterator[Batch]:
    """Yield the training batches, a function of the recipe's seed alone."""
    features, seed = prepared.train, recipe.draft_seed
    for epoch, rows in batch_order(len(features), recipe.draft_batch, seed, steps):
        yield _batch(features, rows.tolist(), prepared, recipe, epoch)


def heldout_batches(prepared: Prepared, recipe: Recipe) -> Iterator[Batch]:
    """Yield the held-out samples, a batch at a time, with fixed anchors."""
    features = prepared.heldout
    for start in range(0, len(features), recipe.draft_batch):
        rows = list(range(start, min(start + recipe.draft_batch, len(features))))
        yield _batch(features, rows, prepared, recipe, HELDOUT_EPOCH)


def _batch(
    features: FeatureDirectory, rows: list[int], prepared: Prepared, recipe: Recipe, epoch: int
) -> Batch:
    return collate(
        [features[row] for row in rows],
        rows,
        num_anchors=recipe.anchors,
        seed=recipe.draft_seed,
        epoch=epoch,
        vocab_size=prepared.vocab_size,
        block_size=recipe.block_size,
    )


def step_peak_bytes(
    draft: DSparkDraft, batch: Batch, target: FrozenTarget, objective: ObjectiveConfig
) -> int:
    """Measure the peak of forward and backward, above inputs and parameters."""
    probe = copy.deepcopy(draft)
    probe.draft_head(target.lm_head)  # its rows are held for the whole run, not by the step
    with PeakMemory() as traced:
        accumulate_gradients(probe, [batch], target, objective)
    return traced.peak


def train_draft(
    name: str,
    config: DraftConfig,
    buffers: tuple[Tensor, Tensor] | None,
    prepared: Prepared,
    recipe: Recipe,
    target: FrozenTarget,
    console: Console,
) -> DraftRun:
    """Train one draft, with progress, and evaluate it before and after on held-out modules."""
    objective = objective_config(recipe)
    draft = new_draft(config, recipe.draft_seed, buffers)
    untrained = copy.deepcopy(draft)
    first = next(training_batches(prepared, recipe, 1))
    peak = step_peak_bytes(draft, first, target, objective)
    before = evaluate(draft, heldout_batches(prepared, recipe), target, objective)
    curve: list[dict[str, Any]] = []
    tokens = _tokens_by_step(prepared, recipe)
    started = time.perf_counter()
    with stage(f"{name} draft", recipe.draft_steps, console) as progress:

        def on_step(report: StepReport, *_: object) -> None:
            rate = tokens[report.step - 1] / (time.perf_counter() - started)
            curve.append(_point(report))
            progress.update(report.step, _detail(curve[-1], rate))

        train(
            draft,
            training_batches(prepared, recipe, recipe.draft_steps),
            target,
            objective,
            optimizer_config(recipe),
            on_step,
        )
    seconds = time.perf_counter() - started
    after = evaluate(draft, heldout_batches(prepared, recipe), target, objective)
    metrics = {
        "draft_vocab_size": config.draft_vocab_size,
        "parameters": sum(p.numel() for p in draft.parameters()),
        "steps": recipe.draft_steps,
        "tokens_per_second": tokens[-1] / seconds,
        "step_seconds": seconds / recipe.draft_steps,
        "peak_bytes": peak,
        "curve": curve,
        "heldout": {"untrained": _summary(before), "trained": _summary(after)},
    }
    return DraftRun(untrained, draft, metrics)


def _tokens_by_step(prepared: Prepared, recipe: Recipe) -> list[int]:
    """Count the tokens, padding left out, that training has seen after each step."""
    lengths, seen, total = prepared.train.lengths, [], 0
    order = batch_order(len(lengths), recipe.draft_batch, recipe.draft_seed, recipe.draft_steps)
    for _, rows in order:
        total += sum(lengths[row] for row in rows.tolist())
        seen.append(total)
    return seen


def _point(report: StepReport) -> dict[str, Any]:
    values = ratios(report.metrics)
    return {
        "step": report.step,
        "loss": report.loss,
        "tau": values["tau_probabilistic"],
        "coverage": values.get("draft_vocab_coverage"),
        "kept_mass": values.get("teacher_kept_mass"),
        "rate": report.rate,
        "grad_norm": report.gradient_norm,
    }


def _detail(point: dict[str, Any], tokens_per_second: float) -> str:
    parts = [f"loss {point['loss']:.3f}", f"τ {point['tau']:.2f}"]
    if point["coverage"] is not None:
        parts += [f"coverage {point['coverage']:.1%}", f"kept mass {point['kept_mass']:.1%}"]
    return "  ".join([*parts, f"{tokens_per_second:,.0f} tokens/s"])


def _summary(values: dict[str, float | list[float]]) -> dict[str, Any]:
    return {
        "loss": values["loss"],
        "tau": values["tau_probabilistic"],
        "acc": values["acc"],
        "coverage": values.get("draft_vocab_coverage"),
        "kept_mass": values.get("teacher_kept_mass"),
        "accept_position": values["accept_position"],
        "accuracy_position": values["accuracy_position"],
        "teacher_agreement": values["teacher_agreement"],
    }
