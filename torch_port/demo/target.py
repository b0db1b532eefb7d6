"""The demo's target: a tiny Qwen3 causal LM, trained here on the corpus and then frozen.

Shape suffixes: B batch, S tokens, T predicted tokens of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_port.data.conversations import Sample
from torch_port.demo.recipe import Recipe
from torch_port.training.optimizer import OptimizerConfig, rate_at

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from torch_port.demo.tokenizer import SpecialIds

# (step, total steps, loss per token, tokens per second so far)
TargetReport = Callable[[int, int, float, float], None]

_TRAINING_FILE = "training.json"
# Predicted tokens whose logits exist at a time: [512, V] fits the cache, a batch's would not.
_LOGIT_ROWS = 512


@dataclass(frozen=True)
class TargetResult:
    """How good the target became.

    `final_loss` is the mean training loss per token over the last tenth of the steps;
    `heldout_loss` (natural log, per supervised token) and `heldout_top1_probability` (mean of
    the largest probability) are over supervised held-out tokens; `seconds` of training.
    """

    final_loss: float
    heldout_loss: float
    heldout_top1_probability: float
    seconds: float


def train_target(
    train: Sequence[Sample],
    heldout: Sequence[Sample],
    special: SpecialIds,
    recipe: Recipe,
    report: TargetReport,
) -> tuple[Qwen3ForCausalLM, TargetResult]:
    """Train the target from random weights on whole conversations (loss on every token).

    AdamW with the rate of spec sheet §14 (warm-up, cosine to 0), gradients clipped to norm 1, a
    fixed number of steps. Batches hold samples of like length, padded on the right.

    Args:
        train: encoded training conversations.
        heldout: encoded held-out conversations, for the result only.
        special: ids for the model's config.
        recipe: sizes, steps, rate and seed.
        report: called after every step.

    Returns:
        The model in evaluation mode without gradients, and its result.

    Source: issue 2, item 7.
    """
    model = _new_target(special, recipe)
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, recipe.target_weight_decay),
        lr=recipe.target_lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = OptimizerConfig(
        peak_rate=recipe.target_lr,
        warmup_steps=recipe.target_warmup,
        total_steps=recipe.target_steps,
    )
    batches = _batches(train, recipe)
    began, tokens, losses = time.perf_counter(), 0, []
    for step in range(1, recipe.target_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, schedule)
        ids_BS, lengths_B = next(batches)
        losses.append(_backward(model, ids_BS, lengths_B))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int(lengths_B.sum())
        report(step, recipe.target_steps, losses[-1], tokens / (time.perf_counter() - began))
    seconds = time.perf_counter() - began
    model.eval().requires_grad_(False)
    heldout_loss, top1 = evaluate_target(model, heldout, recipe.capture_batch)
    tail = losses[-max(1, len(losses) // 10) :]
    return model, TargetResult(sum(tail) / len(tail), heldout_loss, top1, seconds)


@torch.no_grad()
def evaluate_target(
    model: Qwen3ForCausalLM, samples: Sequence[Sample], batch_size: int
) -> tuple[float, float]:
    """Loss and mean top-1 probability of the target where the label is supervised.

    Args:
        model: the target.
        samples: encoded conversations with at least one supervised label.
        batch_size: samples of one forward pass.

    Returns:
        (mean −log p(label), mean max p), both over supervised labels.
    """
    loss = top1 = count = 0.0
    ordered = sorted(samples, key=lambda sample: len(sample.input_ids))
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first : first + batch_size]
        ids_BS, _ = _pad(batch)
        mask_BS = nn.utils.rnn.pad_sequence(
            [torch.from_numpy(sample.loss_mask) for sample in batch], batch_first=True
        )
        states_BSH = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
        chosen = torch.nonzero(mask_BS[:, 1:].reshape(-1) > 0.5).squeeze(1)
        states_TH = states_BSH[:, :-1].flatten(0, 1)[chosen]
        labels_T = ids_BS[:, 1:].reshape(-1)[chosen]
        for rows, labels in zip(
            states_TH.split(_LOGIT_ROWS), labels_T.split(_LOGIT_ROWS), strict=True
        ):
            logp = F.log_softmax(model.lm_head(rows), dim=-1)
            loss += F.nll_loss(logp, labels, reduction="sum").item()
            top1 += logp.amax(-1).exp().sum().item()
        count += len(labels_T)
    return loss / count, top1 / count


def save_target(model: Qwen3ForCausalLM, result: TargetResult, directory: Path) -> None:
    """Write model (safetensors) and result into an existing directory.

    Args:
        model: the trained target.
        result: what `train_target` returned with it.
        directory: exists; the caller makes it appear atomically.
    """
    model.save_pretrained(directory)
    (directory / _TRAINING_FILE).write_text(json.dumps(asdict(result)), encoding="utf-8")


def load_target(directory: Path) -> tuple[Qwen3ForCausalLM, TargetResult]:
    """Read what `save_target` wrote, from the disk alone.

    Args:
        directory: a complete target directory.

    Returns:
        The model (float32, evaluation mode, no gradients) and its result.
    """
    silence_transformers()
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
    result = json.loads((directory / _TRAINING_FILE).read_text(encoding="utf-8"))
    return model.eval().requires_grad_(False), TargetResult(**result)


def silence_transformers() -> None:
    """Keep progress bars and advice of transformers off the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _new_target(special: SpecialIds, recipe: Recipe) -> Qwen3ForCausalLM:
    """A Qwen3 causal LM with seeded random weights; the global generator is left as it was."""
    silence_transformers()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        max_position_embeddings=recipe.max_length,
        # Untied: a mix-up of embedding and head must show.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=special.turn_end,
        pad_token_id=special.pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, norms do not (spec sheet §14)."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _backward(model: Qwen3ForCausalLM, ids_BS: Tensor, lengths_B: Tensor) -> float:
    """Accumulate the gradient of the mean loss per token; returns that loss.

    The head's part runs slice by slice down to the states' gradient, because the logits of a
    whole batch cost more in memory traffic than everything else in the step.
    """
    states_BSH = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
    inside_BS = torch.arange(1, ids_BS.shape[1]) < lengths_B[:, None]
    chosen_T = torch.nonzero(inside_BS.reshape(-1)).squeeze(1)
    states_TH = states_BSH[:, :-1].flatten(0, 1)[chosen_T]
    labels_T = ids_BS[:, 1:].reshape(-1)[chosen_T]
    leaf_TH = states_TH.detach().requires_grad_()
    total = 0.0
    for rows, labels in zip(leaf_TH.split(_LOGIT_ROWS), labels_T.split(_LOGIT_ROWS), strict=True):
        loss = F.cross_entropy(model.lm_head(rows), labels, reduction="sum") / len(labels_T)
        loss.backward()
        total += loss.item()
    states_TH.backward(leaf_TH.grad)
    return total


def _batches(samples: Sequence[Sample], recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (`ids` [B, S], `lengths` [B]) of like lengths, reshuffled every epoch."""
    size = min(recipe.target_batch, len(samples))
    lengths = np.array([len(sample.input_ids) for sample in samples])
    draw = np.random.default_rng(recipe.seed)
    while True:
        # A random number breaks ties: rows of equal length meet other rows in every epoch.
        order = np.lexsort((draw.random(len(samples)), lengths))
        cut = len(samples) // size * size
        offset = draw.integers(len(samples) - cut + 1)  # the rest is another one each time
        rows = order[offset : offset + cut].reshape(-1, size)
        for row in draw.permutation(len(rows)):
            yield _pad([samples[i] for i in rows[row]])


def _pad(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, S] (padding is id 0, which no earlier position sees) and lengths [B]."""
    ids = [torch.from_numpy(sample.input_ids) for sample in samples]
    return (
        nn.utils.rnn.pad_sequence(ids, batch_first=True),
        torch.tensor([len(row) for row in ids]),
    )
