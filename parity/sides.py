"""A case through either implementation, to the same kind of answer.

This is the one place where both packages are called; each is imported only when its side runs, so
the port's side works without jax.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parity.cases import Array, Case, as_dtype
from parity.compiling import XLA_FLAGS
from parity.names import BUFFERS, to_flax, to_torch
from parity.small_sizes import settings_of, sizes_of


@dataclass(frozen=True)
class Answer:
    """What one side says of a case. `error` is set instead of the rest when it gave no answer.

    `failure` says how: "refused" (an error meant for users), "not built", or "broke off" (an
    exception that no user should see: a case the side does not understand, or a bug).
    `cells` (of the blocks) and `stages` (terms of every slot) are the suite's, `parity.stages`.
    """

    loss: float = 0.0
    metrics: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    gradients: dict[str, Array] = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)
    cells: dict[str, Array] = field(default_factory=dict)
    stages: dict[str, Array] = field(default_factory=dict)
    error: str | None = None
    failure: str | None = None


def run_port(case: Case, dtype: str, answer: Callable[[Case, str], Answer] | None = None) -> Answer:
    """Answer a case with `torch_port`, computed as `case.compute` says, in "float64" or "float32".

    `answer` does the work (by default one batch: loss, metrics, gradients); what it raises becomes
    the answer's error.
    """
    from torch_port.errors import NotBuiltError, UserError

    try:
        with sizes_of(case.compute):
            return (answer or port_answer)(case, dtype)
    except NotBuiltError as error:
        return Answer(error=str(error), failure="not built")
    except UserError as error:
        return Answer(error=str(error), failure="refused")
    except Exception as error:  # noqa: BLE001 (one bad case must not end the run)
        return _broke_off(error)


def port_answer(case: Case, dtype: str) -> Answer:
    """Answer a batch with the port; raises what the port raises."""
    import torch

    from torch_port.objective.families import family_of

    draft, target = port_draft(case, dtype)
    objective = port_objective(case, draft)
    family = family_of(draft, objective)
    batch = family.prepare(draft, port_batch(case.group("batch"), dtype), target)
    denominators = family.reduce(draft, family.denominators(draft, batch, objective))
    family.check(denominators.den.item(), denominators.ce_den.item(), objective)
    outcome = family.forward(draft, batch, target, objective, denominators)
    loss = outcome.loss
    assert loss is not None  # denominators were given
    torch.autograd.backward(loss)
    with torch.no_grad():
        e = draft.embed_previous(outcome.blocks.previous)
        logits = draft.logits(outcome.hidden, e, draft.output_head(target.lm_head))
        confidence = draft.confidence(outcome.hidden, e, detach=False)
    tensors = {
        "accept_probability": outcome.terms.accept,
        "eval_mask": outcome.blocks.evaluated,
        "draft_logits": logits,
        "hidden": outcome.hidden,
    }
    if confidence is not None:
        tensors["confidence_logits"] = confidence
    return Answer(
        loss=loss.item(),
        metrics={n: (to_numpy(a), to_numpy(b)) for n, (a, b) in outcome.metrics.items()},
        gradients={
            name: to_numpy(torch.zeros_like(p) if p.grad is None else p.grad)
            for name, p in draft.named_parameters()
        },
        tensors={name: to_numpy(value) for name, value in tensors.items()},
        stages=_port_stages(outcome),
    )


def _port_stages(outcome: Any) -> dict[str, Array]:
    names = ("kept_mass", "teacher_top", "draft_top", "ce", "l1", "confidence_loss")
    found = {name: getattr(outcome.terms, name) for name in names}
    if hasattr(outcome, "weights"):  # DFlash's, D-PACE's among them
        found["slot_weights"] = outcome.weights
    return {name: to_numpy(value) for name, value in found.items()}


def to_numpy(tensor: Any) -> Array:
    """Return a tensor's values; bf16, which NumPy has not, as the float32 numbers they are."""
    import torch

    value = tensor.detach()
    array: Array = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return array


def _stored(dtype: str) -> str:
    """The type in which NumPy holds what is then cast to `dtype`."""
    return "float32" if dtype == "bfloat16" else dtype


def port_draft(case: Case, dtype: str) -> tuple[Any, Any]:
    """Build the port's (draft, frozen target) of a case, in `dtype` ("bfloat16" too)."""
    import torch

    from torch_port.compute import ComputeConfig
    from torch_port.config import DraftConfig
    from torch_port.models.block_draft import FrozenTarget
    from torch_port.objective.families import FAMILIES

    config = DraftConfig.from_hf(case.config)
    draft: Any = FAMILIES[config.projector_type].draft(
        config, ComputeConfig(**settings_of(case.compute))
    )
    weights = {name: torch.from_numpy(value) for name, value in case.group("weights").items()}
    draft.load_state_dict(weights)
    draft.to(getattr(torch, dtype))
    frozen = as_dtype(case.group("target"), _stored(dtype))
    target = FrozenTarget(
        *(
            torch.from_numpy(frozen[f"{name}.weight"]).to(getattr(torch, dtype))
            for name in ("embed_tokens", "lm_head")
        )
    )
    return draft, target


def port_objective(case: Case, draft: Any) -> Any:
    """Read a case's objective as the draft's family has it."""
    from torch_port.objective.families import FAMILIES

    return FAMILIES[draft.algorithm].objective(**case.objective)


def port_batch(arrays: dict[str, Array], dtype: str) -> Any:
    """Make the port's batch of NumPy arrays."""
    import torch

    from torch_port.data.batch import Batch

    stored = as_dtype(arrays, _stored(dtype))
    tensors: dict[str, Any] = {n: torch.from_numpy(v) for n, v in stored.items()}
    batch = Batch(**tensors)
    return batch if dtype != "bfloat16" else batch.to(torch.device("cpu"), torch.bfloat16)


def setup_jax() -> None:
    """Let JAX compute in float64, and compile fast rather than for speed (`parity.compiling`)."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {XLA_FLAGS}".strip()
    import jax

    jax.config.update("jax_enable_x64", True)


def run_spec(case: Case, dtype: str, answer: Callable[[Case, str], Answer] | None = None) -> Answer:
    """Answer a case with `jaxdraft`, in "float64" or "float32"; `answer` as in `run_port`."""
    setup_jax()
    from jaxdraft.config import NotBuilt

    try:
        return (answer or spec_answer)(case, dtype)
    except NotBuilt as error:
        return Answer(error=str(error), failure="not built")
    except ValueError as error:
        return Answer(error=str(error), failure="refused")
    except Exception as error:  # noqa: BLE001 (one bad case must not end the run)
        return _broke_off(error)


def _broke_off(error: Exception) -> Answer:
    first_line = str(error).strip().split("\n", 1)[0]
    return Answer(error=f"{type(error).__name__}: {first_line}", failure="broke off")


def spec_answer(case: Case, dtype: str) -> Answer:
    """Answer a batch with the spec; raises what the spec raises."""
    from jaxdraft.config import DFLASH, ObjectiveConfig
    from jaxdraft.dflash import DFlashObjective, gradients_dflash
    from jaxdraft.evaluate import gradients

    config, params, target, vocabulary = spec_draft(case, dtype)
    batch = spec_batch(case.group("batch"), dtype)
    if config.projector_type == DFLASH:
        evaluation, grads = gradients_dflash(
            config, DFlashObjective(**case.objective), params, target, vocabulary, batch
        )
    else:
        evaluation, grads = gradients(
            config, ObjectiveConfig(**case.objective), params, target, vocabulary, batch
        )
    tensors = {
        name: np.asarray(getattr(evaluation, name))
        for name in (
            "accept_probability",
            "eval_mask",
            "draft_logits",
            "hidden",
            "confidence_logits",
        )
        if getattr(evaluation, name) is not None
    }
    return Answer(
        loss=float(evaluation.loss),
        metrics={n: (np.asarray(a), np.asarray(b)) for n, (a, b) in evaluation.metrics.items()},
        gradients=to_torch(grads),
        tensors=tensors,
    )


def spec_draft(case: Case, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Build the spec's (config, params, target, vocabulary map) of a case."""
    import jax.numpy as jnp
    from jax import tree_util

    from jaxdraft.config import DraftConfig
    from jaxdraft.evaluate import Target
    from jaxdraft.vocabulary import identity_map, map_from_buffers

    config = DraftConfig.from_hf(case.config)
    weights = as_dtype(case.group("weights"), dtype)
    buffers = {name: weights.pop(name) for name in BUFFERS if name in weights}
    vocabulary = (
        map_from_buffers(buffers["t2d"], buffers["d2t"])
        if config.prunes
        else identity_map(config.vocab_size)
    )
    frozen = as_dtype(case.group("target"), dtype)
    target = Target(
        jnp.asarray(frozen["embed_tokens.weight"]), jnp.asarray(frozen["lm_head.weight"])
    )
    return config, tree_util.tree_map(jnp.asarray, to_flax(weights)), target, vocabulary


def spec_batch(arrays: dict[str, Array], dtype: str) -> Any:
    """Make the spec's batch of NumPy arrays."""
    import jax.numpy as jnp

    from jaxdraft.evaluate import Batch

    return Batch(**{n: jnp.asarray(v) for n, v in as_dtype(arrays, dtype).items()})
