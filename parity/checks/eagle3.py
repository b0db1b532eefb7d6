"""EAGLE3 on both sides: the training-time test over n steps, its loss and gradients (sheet §13).

An EAGLE3 case has `eagle3` in case.json, which holds `steps` (n); its objective is empty and its
batch has no anchors. t2d and d2t are always among the weights, the embedding is the target's.
Metrics and tensors are per step: `*_step` [n], and tensors [B, n, S, …].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parity.cases import Array, Case, as_dtype
from parity.names import BUFFERS, EAGLE3_TABLE, to_flax, to_torch
from parity.sides import Answer, port_batch
from parity.small_sizes import settings_of

# Fields of the schema with one value, which the port's config does not have.
_FIXED = (
    "architectures",
    "model_type",
    "num_hidden_layers",
    "hidden_act",
    "attention_bias",
    "tie_word_embeddings",
)


def spec_eagle3(case: Case, dtype: str) -> Answer:
    """Answer an EAGLE3 case with the spec: loss, metrics per step, gradients, slot tensors."""
    import jax.numpy as jnp
    from jax import tree_util

    from jaxdraft.eagle3_config import Eagle3Config, Eagle3Objective
    from jaxdraft.eagle3_evaluate import Eagle3Batch, gradients_eagle3
    from jaxdraft.evaluate import Target
    from jaxdraft.vocabulary import map_from_buffers

    weights = as_dtype(case.group("weights"), dtype)
    buffers = {name: weights.pop(name) for name in BUFFERS}
    frozen = as_dtype(case.group("target"), dtype)
    batch = as_dtype(case.group("batch"), dtype)
    evaluation, grads = gradients_eagle3(
        Eagle3Config.from_hf(case.config),
        Eagle3Objective(**case.extra["eagle3"], **case.objective),
        tree_util.tree_map(jnp.asarray, to_flax(weights, EAGLE3_TABLE)),
        Target(jnp.asarray(frozen["embed_tokens.weight"]), jnp.asarray(frozen["lm_head.weight"])),
        map_from_buffers(buffers["t2d"], buffers["d2t"]),
        Eagle3Batch(**{name: jnp.asarray(value) for name, value in batch.items()}),
    )
    names = "accept_probability", "eval_mask", "draft_logits", "hidden"
    return Answer(
        loss=float(evaluation.loss),
        metrics={n: (np.asarray(a), np.asarray(b)) for n, (a, b) in evaluation.metrics.items()},
        gradients=to_torch(grads, EAGLE3_TABLE),
        tensors={name: np.asarray(getattr(evaluation, name)) for name in names},
    )


def port_eagle3(case: Case, dtype: str) -> Answer:
    """Answer an EAGLE3 case with the port, likewise.

    The port lays its slots out by the teacher's position p = t+1+i; here they stand at t again, and
    those without a teacher in the sequence are 0, unsupervised.
    """
    import torch

    from torch_port.config_eagle3 import Eagle3Objective
    from torch_port.objective import eagle3 as port

    draft, target = port_eagle3_draft(case, dtype)
    objective = Eagle3Objective(**case.extra["eagle3"], **case.objective)
    rows = len(case.tensors["batch/input_ids"])
    unused = {
        "anchor_positions": np.zeros((rows, 1), np.int64),
        "block_keep_mask": np.zeros((rows, 1), bool),
    }
    prepared = port.prepare_eagle3(draft, port_batch(case.group("batch") | unused, dtype), target)
    local = port.eagle3_denominators(draft, prepared, objective)
    sums = port.reduce_eagle3_denominators(draft, local)
    port.check_eagle3_denominators(sums.den.item(), sums.ce_den.item(), objective)
    outcome = port.forward_eagle3(draft, prepared, target, objective, sums)
    loss = outcome.loss
    assert loss is not None  # denominators were given
    torch.autograd.backward(loss)
    names = "loss_step", "accept_step", "accuracy_step"
    metrics = {n: (a.numpy(), b.numpy()) for n, (a, b) in outcome.metrics.items() if n in names}
    metrics["in_vocabulary_step"] = (
        outcome.metrics["ce_step"][1].numpy(),
        outcome.metrics["accuracy_step"][1].numpy(),
    )
    hidden = torch.stack(outcome.states, 1).detach()
    seq = hidden.shape[2]
    return Answer(
        loss=loss.item(),
        metrics=metrics,
        gradients={
            name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy()
            for name, p in draft.named_parameters()
        },
        tensors={
            "accept_probability": _by_index(outcome.terms.accept.detach().numpy(), seq),
            "eval_mask": _by_index(outcome.terms.supervised.numpy(), seq),
            "draft_logits": draft.lm_head(hidden).detach().numpy(),
            "hidden": hidden.numpy(),
        },
    )


def port_eagle3_draft(case: Case, dtype: str) -> tuple[Any, Any]:
    """Build the port's (EAGLE3 draft, frozen target) of a case."""
    import torch

    from torch_port.compute import ComputeConfig
    from torch_port.config_eagle3 import Eagle3Config
    from torch_port.models.dspark import FrozenTarget
    from torch_port.models.eagle3 import Eagle3Draft

    flat = {name: value for name, value in case.config.items() if name not in _FIXED}
    flat["draft_vocab_size"] = flat.get("draft_vocab_size") or flat["vocab_size"]
    captured = flat.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    config = Eagle3Config(**flat, target_layer_ids=tuple(captured))
    draft = Eagle3Draft(config, ComputeConfig(**settings_of(case.compute)))
    weights = {name: torch.from_numpy(value) for name, value in case.group("weights").items()}
    embedding = torch.from_numpy(case.tensors["target/embed_tokens.weight"])
    draft.load_state_dict(weights | {"embed_tokens.weight": embedding})
    draft.to(getattr(torch, dtype))
    frozen = as_dtype(case.group("target"), dtype)
    return draft, FrozenTarget(
        torch.from_numpy(frozen["embed_tokens.weight"]), torch.from_numpy(frozen["lm_head.weight"])
    )


def _by_index(slots: Array, seq: int) -> Array:
    """From [n, B, S−2] by teacher position, less 1, to [B, n, S] by index."""
    steps, rows, positions = slots.shape
    result = np.zeros((rows, steps, seq), slots.dtype)
    for i in range(steps):
        result[:, i, : max(0, positions - i)] = slots[i, :, i:]
    return result
