"""One training step on the device beside the conformance vector that is shipped in `vector/`.

The vector is a case of the specification's own set: a draft of two layers with a pruned vocabulary,
a batch with a dropped block, and in float64 the loss and every gradient. The step runs in float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from torch_port.config import DraftConfig, ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.doctor.checks import Check, guarded
from torch_port.doctor.kernels import relative_error
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.dspark import DSparkDraft
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
from torch_port.training.step import accumulate_gradients, training_step

RATE = 1e-3
# On a CPU float32 gives 2e-6 here. A card may take factors of float32 products rounded to HF32's
# 2⁻¹² = 2.4e-4, through two layers, an objective and back: a few times that.
TOLERANCE = 2e-3
# Adam's first update is the rate against the gradient's sign: m̂/√v̂ = g/|g|. Elements of a size
# that rounding cannot turn are judged; float32 weights up to 3 round by 2⁻²³·3/RATE = 4e-4 rates.
MOVED = 2e-3
REMEDY = (
    "look at the kernels' lines first; then run the step with the portable kernels "
    "(torch_port.device.use_kernels(PORTABLE)) on the card: what still differs is no fused kernel"
)


@dataclass(frozen=True)
class Vector:
    """A case: draft config, objective, expected loss, and tensors by name."""

    config: dict[str, Any]
    objective: dict[str, Any]
    loss: float
    tensors: dict[str, Tensor]

    def group(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors below a prefix, by the rest of their names."""
        return {
            name.removeprefix(f"{prefix}/"): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(f"{prefix}/")
        }


def shipped_vector() -> Vector:
    """Read the package's vector."""
    place = files("torch_port.doctor") / "vector"
    case = json.loads((place / "case.json").read_text(encoding="utf-8"))
    tensors = load((place / "tensors.safetensors").read_bytes())
    return Vector(case["config"], case["objective"], case["expect"]["loss"], tensors)


def check_step(device: torch.device) -> list[Check]:
    """Take the vector's step on `device` with the kernels that it gets; four lines.

    Loss and gradients from `accumulate_gradients`, the gradient norm and the update from
    `training_step`, on the same batch.
    """
    try:
        return _lines(shipped_vector(), device)
    except Exception as error:  # noqa: BLE001 (the report has to come to its end)
        return [guarded("step", f"on {device}", error, REMEDY)]


def _lines(vector: Vector, device: torch.device) -> list[Check]:
    draft = DSparkDraft(DraftConfig.from_hf(vector.config))
    draft.load_state_dict(vector.group("weights"))
    draft.to(device)
    frozen = vector.group("target")
    target = FrozenTarget(
        frozen["embed_tokens.weight"].to(device), frozen["lm_head.weight"].to(device)
    )
    tensors: dict[str, Any] = dict(vector.group("batch"))
    batch = Batch(**tensors).laid_out(draft.config.block_size, draft.block_layout)
    moved = batch.to(device, torch.float32)
    objective = ObjectiveConfig(**vector.objective)
    optimizer = MasterAdamW(
        draft.named_parameters(),
        OptimizerConfig(peak_rate=RATE, warmup_steps=1, total_steps=10),
    )
    expected = vector.group("expect/grad")
    loss, *_ = accumulate_gradients(draft, [moved], target, objective)
    found = {n: p.grad.cpu() for n, p in draft.named_parameters() if p.grad is not None}
    before = {name: p.detach().cpu().clone() for name, p in draft.named_parameters()}
    optimizer.release_gradients()
    report = training_step(draft, optimizer, [moved], target, objective, 1)
    after = {name: p.detach().cpu() for name, p in draft.named_parameters()}
    norm = float(torch.cat([g.flatten() for g in expected.values()]).norm())
    return [
        _line("loss", abs(float(loss) - vector.loss) / abs(vector.loss), TOLERANCE),
        _line("gradients", *_worst(found, expected)),
        _line("gradient norm", abs(report.gradient_norm - norm) / norm, TOLERANCE),
        _line("update", _moved_error(before, after, expected), MOVED),
    ]


def _line(name: str, error: float, tolerance: float, worst: str = "") -> Check:
    at = f" ({worst})" if worst else ""
    text = f"error {error:.1e}{at}, allowed {tolerance:.0e}; against float64, in float32"
    if error <= tolerance:
        return Check("step", name, "ok", text)
    return Check("step", name, "failed", text, REMEDY)


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float, str]:
    """Return (worst error, tolerance, its parameter); a gradient that is absent is infinitely off.

    Relative to the tensor's largest magnitude, or 1e-2 where that is less.
    """
    errors = {}
    for name, gradient in expected.items():
        if name not in found:
            return float("inf"), TOLERANCE, f"{name}: no gradient"
        scale = float(gradient.abs().max())
        errors[name] = relative_error(found[name], gradient) * scale / max(scale, 1e-2)
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], TOLERANCE, worst


def _moved_error(
    before: dict[str, Tensor], after: dict[str, Tensor], gradient: dict[str, Tensor]
) -> float:
    """Return how far any weight's move is from −rate · sign(gradient), in rates."""
    worst = 0.0
    for name, g in gradient.items():
        judged = (g.abs() > 1e-2 * g.abs().max()) & (g.abs() > 1e-5)
        move = (after[name] - before[name]).double() / RATE
        error = torch.where(judged, (move + g.sign()).abs(), 0.0)
        worst = max(worst, float(error.max()))
    return worst
