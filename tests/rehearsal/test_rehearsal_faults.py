"""Planted faults: each is found by its kind, its operator and its line, and a clean run has none.

A fault is planted by wrapping a function of the package; the line is that of the function's call.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dflash_toys import dflash_hf
from eagle3_toys import SIZES as EAGLE3
from rehearsal_toys import K, line_of, rehearsed, toy_config, toy_run, wrong
from torch import Tensor

from torch_port.config import DraftConfig
from torch_port.config_eagle3 import Eagle3Config
from torch_port.errors import UserError
from torch_port.models import backbone, block_draft
from torch_port.models.backbone import MLP, Attention
from torch_port.models.block_draft import BlockDraft
from torch_port.models.dspark import DSparkDraft
from torch_port.objective import fused_batch
from torch_port.objective.fused_batch import fused_objective
from torch_port.rehearsal.rehearse import Rehearsal, rehearse
from torch_port.rehearsal.report import Looks
from torch_port.run import resolve
from torch_port.training import step as training
from torch_port.training.step import training_step

# --- Faults --------------------------------------------------------------------------------------
# Each does what somebody's code might do with a device's tensor `x` of four floats.


def host_mask(x: Tensor) -> None:
    x * torch.ones(4)


def float64_table(x: Tensor) -> None:
    x * torch.linspace(0, 1, 4, dtype=torch.float64, device=x.device).to(x.dtype)


def unlisted_operator(x: Tensor) -> None:
    torch.special.bessel_j0(x)


def item(x: Tensor) -> None:
    x.sum().item()


def truth_value(x: Tensor) -> None:
    assert x.sum() > 0


def int64_scatter_add(x: Tensor) -> None:
    index = torch.zeros(4, dtype=torch.int64, device=x.device)
    torch.zeros_like(index).scatter_add_(0, index, index)


def upload(x: Tensor) -> None:
    x * torch.tensor([2.0] * 4, device=x.device)


def download(x: Tensor) -> None:
    x.cpu()


def host_scalar(x: Tensor) -> None:
    x * torch.tensor(2.0)


@dataclass(frozen=True)
class Plant:
    """A fault, what it is found as, and the call that it follows: a function's, in its caller."""

    fault: Callable[[Tensor], None]
    kind: str
    operator: str
    module: ModuleType
    function: str
    caller: Callable[..., Any]

    @property
    def where(self) -> str:
        return line_of(self.caller, f"{self.function}(")


PLANTS = [
    Plant(host_mask, "host tensor", "aten::mul.Tensor", backbone, "swiglu", MLP.forward),
    Plant(
        *(float64_table, "float64", "aten::linspace.default"),
        *(backbone, "blockwise_attention", Attention.forward),
    ),
    Plant(
        *(unlisted_operator, "CPU fallback", "aten::special_bessel_j0.default"),
        *(block_draft, "_seen_states", BlockDraft.forward),
    ),
    # In the function of the documented sync, but not at its line.
    Plant(item, "sync", "aten::_local_scalar_dense.default", training, "rate_at", training_step),
    Plant(
        *(truth_value, "sync", "aten::_local_scalar_dense.default"),
        *(fused_batch, "_factors", fused_objective),
    ),
    Plant(
        *(int64_scatter_add, "int64 scatter", "aten::scatter_add_.default"),
        *(fused_batch, "_markov", fused_objective),
    ),
    Plant(
        *(upload, "upload", "aten::_to_copy.default"),
        *(fused_batch, "covered_teacher", fused_objective),
    ),
    Plant(
        *(download, "sync", "aten::_to_copy.default"),
        *(fused_batch, "to_places", fused_objective),
    ),
]


def plant(monkeypatch: pytest.MonkeyPatch, planted: Plant) -> None:
    """Let the fault follow every call of the function."""
    right = getattr(planted.module, planted.function)

    def wrong_one(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        planted.fault(torch.ones(4, device="npu:0"))
        return result

    monkeypatch.setattr(planted.module, planted.function, wrong_one)


@pytest.fixture(scope="module")
def faulty() -> Rehearsal:
    """One rehearsal with all faults, each at a line of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for planted in PLANTS:
            plant(monkeypatch, planted)
        return rehearsed()[0]


@pytest.mark.parametrize("planted", PLANTS, ids=[planted.fault.__name__ for planted in PLANTS])
def test_a_planted_fault_is_found_by_kind_operator_and_line(
    faulty: Rehearsal, planted: Plant
) -> None:
    """Faults: not seen; seen as another kind or operator; another line blamed."""
    here = [f for f in wrong(faulty) if f.where == planted.where]
    assert {f.kind for f in here} == {planted.kind}
    times = [f.count for f in here if f.name == planted.operator]
    assert sum(times) >= 2  # in both steps


def test_no_other_line_is_blamed(faulty: Rehearsal) -> None:
    """Fault: what follows from a fault, or its gradient, is told of a line that is right."""
    assert {f.where for f in wrong(faulty)} == {planted.where for planted in PLANTS}


def test_a_boolean_index_ends_the_rehearsal_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: torch's own words, without the line; a shape that is made up."""

    def boolean_index(x: Tensor) -> None:
        x[x > 0].sum()

    planted = Plant(boolean_index, "", "aten::index.Tensor", backbone, "swiglu", MLP.forward)
    plant(monkeypatch, planted)
    with pytest.raises(UserError) as error:
        rehearsed()
    assert f"aten::index.Tensor at {planted.where}" in str(error.value)


# --- Collectives ---------------------------------------------------------------------------------


def test_collectives_of_two_ranks_and_an_extra_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: one not seen; bytes or dtype of another; a documented one called extra; one in a
    model file passes, or its bools do (field-note 35).

    Of the toy: one denominator, then the gradients of all weights in float32, in one bucket.
    """

    def extra(x: Tensor) -> None:
        dist.all_reduce(x > 0)

    planted = Plant(extra, "", "c10d::allreduce_.default", backbone, "swiglu", MLP.forward)
    plant(monkeypatch, planted)
    rehearsal, looks = rehearsed(toy_run(mode="ddp"), world_size=2)
    assert {(f.kind, f.name, f.where) for f in wrong(rehearsal)} == {
        ("extra collective", planted.operator, planted.where),
        ("collective dtype", planted.operator, planted.where),
    }
    weights = sum(p.numel() for p in DSparkDraft(toy_config()).parameters())
    told = [(c.name, c.dtype, c.bytes, c.group) for c in looks.collectives.of_last_step()]
    assert told == [
        ("allreduce", "float32", 4, "0 (2)"),
        ("allreduce", "bool", 4, "0 (2)"),
        ("allreduce", "float32", 4 * weights, "0 (2)"),
    ]


def test_collectives_of_sharding() -> None:
    """Faults: a gather of a layer not seen; FSDP2's called extra, wherever its hooks send.

    As `training.distribution` documents them: U units (the layers, the Markov head, the rest) and L
    layers: U + L all-gathers in bf16, U reduce-scatters in float32, a denominator and a norm.
    """
    two = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    rehearsal, looks = rehearsed(toy_run(mode="fsdp"), world_size=4, **two)
    assert wrong(rehearsal) == []
    told = Counter((c.name, c.dtype) for c in looks.collectives.of_last_step())
    assert told == {
        ("allreduce", "float32"): 2,
        ("allgather_base", "bfloat16"): 4 + 2,
        ("reduce_scatter_base", "float32"): 4,
    }


# --- Clean runs ----------------------------------------------------------------------------------

SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 6}


@pytest.mark.parametrize(
    ("compute", "changes"),
    [
        ({}, {"draft_vocab_size": K, "markov_head_type": "gated"}),
        ({"objective": "plain", "attention": "dense", "recompute": "layer"}, {}),
        ({}, SLIDING | {"markov_head_type": "rnn"}),
    ],
    ids=["pruned", "plain", "sliding rnn"],
)
def test_a_clean_run_has_no_finding(
    monkeypatch: pytest.MonkeyPatch, compute: dict, changes: dict
) -> None:
    """Faults: a false alarm; a number of the host, which torch hands over, called wrong; the
    documented sync not told, or told more than once a step."""
    scalar = Plant(host_scalar, "", "aten::mul.Tensor", backbone, "swiglu", MLP.forward)
    plant(monkeypatch, scalar)
    rehearsal, _ = rehearsed(toy_run(**compute), **changes)
    assert wrong(rehearsal) == []
    (noted,) = (f for f in rehearsal.findings if f.kind == "host scalar")
    assert (noted.name, noted.where) == (scalar.operator, scalar.where)
    (sync,) = (f for f in rehearsal.findings if f.kind == "sync")
    assert sync.where == line_of(training_step, ".tolist()")
    assert sync.count == 2  # steps


@pytest.mark.parametrize(
    ("algorithm", "config", "objective"),
    [
        ("dflash", DraftConfig.from_hf(dflash_hf()), {"loss_decay_gamma": 4.0}),
        ("eagle3", Eagle3Config(**EAGLE3), {}),
    ],
)
def test_the_other_families_have_no_finding(algorithm: str, config: Any, objective: dict) -> None:
    """Faults: numbers copied from the host in every step; a comparison that ends the rehearsal."""
    values = toy_run().model_dump() | {"algorithm": algorithm, "objective": objective}
    looks = Looks.at("npu")
    rehearsal = rehearse(resolve(values), config=config, observers=looks.observers())
    assert wrong(rehearsal) == []
    parts = looks.flops.by_part()
    assert all(parts[part].products for part in ("attention", "feed-forward", "objective"))
    assert "other" not in parts or not parts["other"].products
