"""Captured states that nothing reads: whatever they hold, loss, metrics and gradients stay."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash_toys import FUSED, OBJECTIVES, PLAIN, dflash_draft, holed_batch
from eagle3_toys import eagle3_batch, eagle3_draft
from emulated_npu import emulated_torch_npu
from torch import Tensor
from toys import V, batch, config, draft, target

from torch_port.config import ObjectiveConfig
from torch_port.config_eagle3 import Eagle3Objective
from torch_port.data.batch import Batch
from torch_port.device import NPU, use_kernels
from torch_port.evaluation import evaluate
from torch_port.models.dspark import DSparkDraft
from torch_port.training.step import accumulate_gradients

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


def dspark(compute: Any, **changes: Any) -> DSparkDraft:
    model = DSparkDraft(config(**changes), compute).double()
    model.load_state_dict(draft(**changes).state_dict())
    return model


def outlier() -> Batch:
    """The toys' batch with its dropped block behind the last kept one."""
    return batch(anchors=[[2, 5, 8], [3, 7, 9]])


# Per case: the draft, its batch, its objective, and by hand which states each row reads: of a block
# draft those before its last kept anchor (2, 5, 8 and 3, 7; 2, 7, 10 and 4, 5), at ω = 3 the two
# before each; of EAGLE3 those up to two before the last supervised token (8 and 6).
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Batch], Any, list[set[int]]]] = {
    "dspark, dense": (
        lambda: dspark(PLAIN),
        outlier,
        ObjectiveConfig(),
        [{*range(8)}, {*range(7)}],
    ),
    "dspark": (lambda: dspark(FUSED), outlier, ObjectiveConfig(), [{*range(8)}, {*range(7)}]),
    "dspark, sliding, dense": (
        lambda: dspark(PLAIN, **SLIDING),
        batch,
        ObjectiveConfig(),
        [{0, 1, 3, 4, 6, 7}, {1, 2, 5, 6}],
    ),
    "dspark, sliding": (
        lambda: dspark(FUSED, **SLIDING),
        batch,
        ObjectiveConfig(),
        [{0, 1, 3, 4, 6, 7}, {1, 2, 5, 6}],
    ),
    "dspark, mixed, dense": (
        lambda: dspark(PLAIN, **MIXED),
        batch,
        ObjectiveConfig(),
        [{*range(8)}, {*range(7)}],
    ),
    "dflash, dense": (
        lambda: dflash_draft(PLAIN),
        holed_batch,
        OBJECTIVES["decay"],
        [{*range(10)}, {*range(5)}],
    ),
    "dflash": (
        lambda: dflash_draft(FUSED),
        holed_batch,
        OBJECTIVES["both"],
        [{*range(10)}, {*range(5)}],
    ),
    "eagle3": (  # unpruned, so that every supervised slot has a part in the loss
        lambda: eagle3_draft(kept=tuple(range(V))),
        eagle3_batch,
        Eagle3Objective(steps=3),
        [{*range(7)}, {*range(5)}],
    ),
}


def read_mask(b: Batch, read: list[set[int]]) -> Tensor:
    mask = torch.zeros(b.input_ids.shape, dtype=torch.bool)
    for row, places in enumerate(read):
        mask[row, sorted(places)] = True
    return mask.unsqueeze(-1)


def results(model: Any, b: Batch, objective: Any) -> dict[str, Tensor]:
    """Loss, sums and metrics, and every gradient."""
    model.zero_grad()
    loss, den, ce_den, _ = accumulate_gradients(model, [b], target(), objective)
    values = {"loss": loss, "den": den, "ce_den": ce_den}
    for name, value in evaluate(model, [b], target(), objective).items():
        values[f"metric {name}"] = torch.as_tensor(value)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        values[f"gradient of {name}"] = parameter.grad.clone()
    return values


@pytest.mark.parametrize("kernels", ["own", "npu"])
@pytest.mark.parametrize("name", CASES)
def test_what_nothing_reads_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, kernels: str
) -> None:
    """Fault: NaN or Inf behind the last anchor or in the padding, times an attention share or a
    gradient of 0, is NaN in the loss or in the gradient of fc, norms, keys and values.

    The same program on inputs that must not matter: equal to the bit.
    """
    build, make_batch, objective, read = CASES[name]
    b, model = make_batch(), build()
    seen = read_mask(b, read)
    assert not seen.all(1).any()
    if kernels == "npu":
        monkeypatch.setitem(sys.modules, "torch_npu", emulated_torch_npu(float64=True))
    with use_kernels(NPU) if kernels == "npu" else nullcontext():
        clean = results(model, b, objective)
        assert all(x.isfinite().all() for x in clean.values())
        for poison in (torch.nan, torch.inf, -torch.inf, 1e6):
            spoilt = replace(b, hidden_states=torch.where(seen, b.hidden_states, poison))
            for what, value in results(model, spoilt, objective).items():
                assert torch.equal(value, clean[what]), (poison, what)


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_still_counts(name: str) -> None:
    """Fault: a state that a slot reads zeroed with the others: each of them has a gradient."""
    build, make_batch, objective, read = CASES[name]
    b = make_batch()
    leaf = b.hidden_states.clone().requires_grad_()
    accumulate_gradients(build(), [replace(b, hidden_states=leaf)], target(), objective)
    assert leaf.grad is not None
    found = leaf.grad.abs().amax(-1, keepdim=True) > 1e-12
    assert torch.equal(found, read_mask(b, read))
