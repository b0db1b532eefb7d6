"""Every tolerance of the suite, in one place, each with its reason.

An error is max|got − expected| / max(max|expected|, 1e-2) of one tensor (`compare.relative_error`).
"""

from __future__ import annotations

import numpy as np

from parity.cases import Case
from parity.compare import TOLERANCE

# Whole numbers, booleans, ids and tokens: nothing is rounded, so nothing may differ.
EXACT = 0.0

# A softmax turns the absolute rounding of a logit into a relative error of its probability. Logits
# of size L, sums of H products, are off by about 1e-16·L·√H; beyond this size the tolerance grows
# with L. (Up to it, TOLERANCE has room for the same reason.)
ORDINARY_LOGIT = 100.0


def batch_tolerance(case: Case, dtype: str, largest_logit: float) -> float:
    """Return what a tensor of a batch is judged by: TOLERANCE, wider where logits are hot."""
    return TOLERANCE[dtype] * max(1.0, logit_size(case, largest_logit) / ORDINARY_LOGIT)


def logit_size(case: Case, largest_logit: float) -> float:
    """Return how large a case's logits are: the draft's as computed, the teacher's at most."""
    states = np.nan_to_num(case.tensors["batch/target_last_hidden_states"])
    head = case.tensors["target/lm_head.weight"]
    teacher = np.linalg.norm(states, axis=-1).max() * np.linalg.norm(head, axis=-1).max()
    return max(largest_logit, float(teacher))


# Training in float64, over 50 steps. Gradients agree to about 1e-14 of their tensor's maximum, and
# so do the moments, which are their means. AdamW divides the first by the root of the second: an
# element whose gradient is near 0 enlarges its rounding by up to the tensor's maximum over the
# element, and what that moves enters the next step's gradients. 12 steps were measured at 6e-15;
# a bias of 1e-10 in a rate (1e-2) is no rounding.
TRAINING = {"loss": 1e-9, "moments": 1e-8, "parameters": 1e-8}

# float32 masters under given gradients: both sides do the same dozen float32 operations an element
# and a step, in other orders (rounding 6e-8 each), and 50 steps' errors add up in the masters.
MASTERS = {"masters": 2e-5, "moments": 2e-5}

# Either side in float32 against float64 on the same float32 inputs: rounding 6e-8, enlarged by two
# layers, norms and sums over up to 40 ids and 80 slots. Per-slot terms of a soft case reach 1e-5;
# the gradient divides by √mean square where a norm's input is small, and enlarges it again.
FLOAT32 = {"forward": 1e-4, "gradients": 1e-3}

# The port in bf16 against float64 on the same bf16-rounded inputs: rounding 2⁻⁹ = 2e-3 at each of
# about 20 places on the way (2 layers), so 1e-2 of a tensor's maximum (measured: 1e-2 to 3e-2), and
# a few times that in the worst element of a case with few slots. Gradients are judged by their
# direction, 1 − cosine: an error of a tenth of a tensor's norm turns it by 0.005 (measured: 0.005).
BF16 = {"forward": 0.15, "gradient direction": 0.05}
