"""AdamW's settings (spec sheet §14), apart from the optimizer: reading a run brings no torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from torch_port.config import Settings


class OptimizerConfig(Settings):
    """AdamW's and the schedule's numbers; steps are optimizer steps."""

    peak_rate: float = Field(gt=0)
    final_rate: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(ge=0)
    total_steps: int = Field(ge=1)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)  # ∞ clips nothing
    spike_multiple: float = Field(default=10.0, gt=1, allow_inf_nan=True)  # ∞ skips nothing

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must lie below total_steps "
                f"({self.total_steps}), or the rate never comes down again"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in 0 … 1 (1 excluded), not {list(self.betas)}")
        return self
