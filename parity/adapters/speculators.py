"""The public `speculators` package (0.9.0) as an adapter of `parity judge`.

It runs where the package is installed, which is not our environment (docs/judge.md). The package is
called as its trainer calls it, in eager attention and with its eager losses, in float32; a row of
the batch is a document of its packed sequence. It draws its anchors itself: here they are given.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from parity.adapter import DraftOutputs, NotJudged, Objective, Unavailable
from parity.cases import Array, Case
from parity.conventions import Conventions, family

if importlib.util.find_spec("speculators") is None:
    raise Unavailable(
        "the package speculators is not installed here; docs/judge.md says how to run this "
        "adapter where it is"
    )
VARIANTS = {"none": "fixed-exp-decay", "both": "dpace"}


class Speculators:
    """The package's DSpark and DFlash drafts."""

    conventions = Conventions(
        mask="inputs",
        label="teacher",
        denominator="slots",
        epsilon=1e-5,
        l1="half",
        acceptance="renormalised",
        calibration="slots",
        dpace_denominator="slots",
        window="anchor",
    )
    dtype = "float32"
    families = ("dspark", "dflash")

    def __init__(self) -> None:
        self.name = f"speculators {version('speculators')}"

    def draft_outputs(self, case: Case) -> DraftOutputs:
        """Return what the package's forward pass has at every slot."""
        said = _run(case)
        return DraftOutputs(said["hidden"], said["logits"], said.get("confidence"))

    def objective(self, case: Case) -> Objective:
        """Return the package's loss and those of its metrics that §9 has."""
        said = _run(case)
        return Objective(
            loss=float(said["loss"]),
            metrics=_metrics(case, said["metrics"]),
            accept_probability=said["accept"],
            eval_mask=said["mask"],
        )


def _metrics(case: Case, found: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: float(value) for name, value in found.items()}
    first = 1 if family(case) == "dflash" else 0
    slots = range(first, case.config["block_size"])

    def pair(name: str) -> tuple[float, float]:
        return values[f"{name}_sum"], values[f"{name}_total"]

    sums, totals = zip(*(pair(f"position_{k}_acc") for k in slots), strict=True)
    result: dict[str, Any] = {
        # The package's accuracy is against the teacher's argmax.
        "teacher_agreement": pair("full_acc"),
        "accuracy_position": (np.array(sums), np.array(totals)),
    }
    if first == 1:
        return result
    result |= {
        "tau_probabilistic": pair("accept_len"),
        "ce_loss": values["ce_loss_sum"],
        "l1_loss": values["tv_loss_sum"],
    }
    if "confidence_loss_sum" in values:
        result["confidence_loss"] = values["confidence_loss_sum"]
        for name in ("confidence_abs_error", "confidence_cumprod_bias"):
            result[name] = pair(name)
    return result


def _package(name: str) -> Any:
    """Import a module of the package, which is absent where types are checked."""
    importlib.import_module("speculators")  # registers its models
    return importlib.import_module(f"speculators.{name}")


def _run(case: Case) -> dict[str, Any]:
    import torch

    eager = _package("losses.eager")
    variant = VARIANTS.get(case.objective.get("dpace", "none"))
    if variant is None:
        raise NotJudged(f"D-PACE {case.objective['dpace']!r} is not in the package")
    model = _model(case)
    packed, keep = _packed(case)
    ce, tv = eager.ce_loss, eager.tv_loss
    alphas = case.objective
    dspark = family(case) == "dspark"
    terms = {"ce": (ce, alphas["ce_alpha"] if dspark else 1.0)}
    own: dict[str, Any] = {}
    if dspark:
        terms["tv"] = (tv, alphas["l1_alpha"])
        own = {"tv_loss_fn": tv, "confidence_head_alpha": alphas["confidence_alpha"]}
    anchors = packed.pop("anchors")
    with torch.no_grad(), _given(model, anchors, keep) as caught:
        _, loss, metrics = model(
            **packed,
            loss_config=terms,
            # The package has no way to say "no decay"; an endless one is the same.
            gamma=alphas.get("loss_decay_gamma") or float("inf"),
            max_anchors=len(anchors),
            per_position_loss_weight=variant,
            dpace_alpha=alphas.get("beta") or 0.5,
            **own,
        )
        caught["accept"] = 1.0 - tv(caught["logits"], caught["targets"])
    B, N = case.tensors["batch/anchor_positions"].shape
    shape = B, N, case.config["block_size"]
    said: dict[str, Any] = {
        name: value.reshape(*shape, *value.shape[2:]).numpy() for name, value in caught.items()
    }
    return said | {"loss": loss, "metrics": metrics}


@contextmanager
def _given(model: Any, anchors: Any, keep: Any) -> Iterator[dict[str, Any]]:
    """Give the package its anchors, and catch what it hands to its own loss."""
    dflash, dspark = _package("models.dflash.core"), _package("models.dspark.core")
    caught: dict[str, Any] = {}
    core = dspark if hasattr(model, "markov_head") else dflash
    drawn, computed = dflash.select_anchors, core.compute_metrics

    def catching(logits: Any, targets: Any, *rest: Any, **settings: Any) -> Any:
        caught.update(logits=logits, targets=targets)
        if core is dspark:
            confidence, mask = rest[0], rest[1]
            if confidence is not None:
                caught["confidence"] = confidence
        else:
            mask = rest[0]
        caught["mask"] = mask.bool()
        return computed(logits, targets, *rest, **settings)

    hook = model.norm.register_forward_hook(lambda _m, _i, out: caught.update(hidden=out))
    dflash.select_anchors = lambda *_: (anchors, keep)
    core.compute_metrics = catching
    try:
        yield caught
    finally:
        hook.remove()
        dflash.select_anchors, core.compute_metrics = drawn, computed


def _model(case: Case) -> Any:
    """Build the package's model of a case, its config written by `torch_port.formats`."""
    import torch

    from torch_port.config import DraftConfig
    from torch_port.formats.speculators import speculators_config

    written = speculators_config(DraftConfig.from_hf(case.config), {}, None)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(written))
        config = _package("config").SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention compiles
    model = _package("model").SpeculatorModel.registry[config.speculators_model_type](config).eval()
    state = {n: torch.from_numpy(v) for n, v in case.group("weights").items()}
    head = torch.from_numpy(case.tensors["target/lm_head.weight"])
    rows = head[state["t2d"]] if "t2d" in state else head
    state |= {
        "embed_tokens.weight": torch.from_numpy(case.tensors["target/embed_tokens.weight"]),
        "lm_head.weight": rows,
        "verifier_lm_head.weight": rows,
    }
    # The vectors' T stands after the target's final norm, which the package would apply.
    model.verifier_norm = torch.nn.Identity()
    missing, unknown = model.load_state_dict(state, strict=False)
    left = [name for name in missing if not name.startswith("rotary_emb.")]
    if left or unknown:
        raise RuntimeError(f"weights do not fit the package's model: {left} {unknown}")
    return model


def _packed(case: Case) -> tuple[dict[str, Any], Any]:
    """Pack the rows as documents of one sequence, each with a block of padding behind it.

    The package's blocks may not reach beyond the sequence; ours may.
    """
    import torch

    batch, gamma = case.group("batch"), case.config["block_size"]
    B, S = batch["input_ids"].shape

    def pack(values: Array) -> Any:
        wide = np.zeros((B, S + gamma, *values.shape[2:]), values.dtype)
        wide[:, :S] = values
        return torch.from_numpy(wide.reshape(1, B * (S + gamma), *values.shape[2:]))

    rows = np.arange(B)[:, None]
    positions = np.broadcast_to(np.arange(S + gamma), (B, S + gamma))
    packed = {
        "hidden_states": pack(batch["hidden_states"]),
        "input_ids": pack(batch["input_ids"].astype(np.int64)),
        "loss_mask": pack((batch["loss_mask"] > 0.5).astype(np.int64)),
        "verifier_last_hidden_states": pack(batch["target_last_hidden_states"]),
        "document_ids": torch.from_numpy(np.repeat(np.arange(B), S + gamma)[None]),
        "position_ids": torch.from_numpy(positions.reshape(1, -1).copy()),
        "anchors": torch.from_numpy((batch["anchor_positions"] + rows * (S + gamma)).reshape(-1)),
    }
    return packed, torch.from_numpy(batch["block_keep_mask"].astype(bool).reshape(-1))


adapter = Speculators()
