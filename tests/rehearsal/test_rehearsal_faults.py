"""Planted faults: each is found by its kind, its operator and its line, and a clean run has none.

A fault is planted by wrapping a function that the draft calls; the line is that of the call.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rehearsal_toys import K, line_of, rehearsed, toy_run, wrong
from torch import Tensor

from torch_port.errors import UserError
from torch_port.models import backbone
from torch_port.models.backbone import MLP
from torch_port.rehearsal.trace import Finding
from torch_port.training import step as training
from torch_port.training.step import training_step

CALL = line_of(MLP.forward, "swiglu(")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Wrap the feed-forward's gated unit: its output goes through the fault."""

    def planted(fault: Callable[[Tensor], Tensor]) -> None:
        right = backbone.swiglu
        monkeypatch.setattr(backbone, "swiglu", lambda gate, up: fault(right(gate, up)))

    return planted


def found(findings: list[Finding], kind: str) -> dict[str, str]:
    """Return operator and line of the findings of a kind."""
    return {f.name: f.where for f in findings if f.kind == kind}


def host_mask(x: Tensor) -> Tensor:
    return x * torch.ones(x.shape[-1], dtype=x.dtype)


def float64_table(x: Tensor) -> Tensor:
    return x * torch.linspace(0, 1, x.shape[-1], dtype=torch.float64, device=x.device).to(x.dtype)


def unlisted_operator(x: Tensor) -> Tensor:
    return x + torch.special.bessel_j0(x.detach().float()).to(x.dtype)


def item(x: Tensor) -> Tensor:
    return x * x.detach().sum().item()


def truth_value(x: Tensor) -> Tensor:
    return x if x.detach().sum() > 0 else -x


def int64_scatter_add(x: Tensor) -> Tensor:
    index = torch.zeros(x.shape[-1], dtype=torch.int64, device=x.device)
    return x + torch.zeros_like(index).scatter_add_(0, index, index)


def upload(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0] * x.shape[-1], dtype=x.dtype, device=x.device)


def download(x: Tensor) -> Tensor:
    return x * x.detach().cpu().to(x.device)


def host_equality(x: Tensor) -> Tensor:
    return x if torch.equal(x.detach(), x.detach()) else -x


PLANTED = [
    (host_mask, "host tensor", "aten::mul.Tensor"),
    (float64_table, "float64", "aten::linspace.default"),
    (unlisted_operator, "CPU fallback", "aten::special_bessel_j0.default"),
    (item, "sync", "aten::_local_scalar_dense.default"),
    (truth_value, "sync", "aten::_local_scalar_dense.default"),
    (int64_scatter_add, "int64 scatter", "aten::scatter_add_.default"),
    (upload, "upload", "aten::_to_copy.default"),
    (download, "sync", "aten::_to_copy.default"),
]


@pytest.mark.parametrize(
    ("fault", "kind", "operator"), PLANTED, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_planted_fault_is_found_by_kind_operator_and_line(
    plant: Callable, fault: Callable, kind: str, operator: str
) -> None:
    """Faults: not seen; seen under another name; another line blamed; not counted as wrong."""
    plant(fault)
    rehearsal, _ = rehearsed()
    assert found(wrong(rehearsal), kind).get(operator) == CALL
    # Whatever follows from the fault is at its line, too: nothing else is blamed.
    assert {f.where for f in wrong(rehearsal)} == {CALL}


def test_a_boolean_index_ends_the_rehearsal_with_its_line(plant: Callable) -> None:
    """Fault: torch's own words, without the line; a shape that is made up."""
    plant(lambda x: x + x.detach()[x.detach() > 0].sum())
    with pytest.raises(UserError) as error:
        rehearsed()
    assert f"aten::index.Tensor at {CALL}" in str(error.value)


def test_an_item_beside_the_documented_sync_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: every sync of `training_step` taken for the documented one."""
    right = training.family_of

    def asks(draft, objective):
        next(draft.parameters()).sum().item()
        return right(draft, objective)

    monkeypatch.setattr(training, "family_of", asks)
    rehearsal, _ = rehearsed()
    assert line_of(training_step, "family_of(draft, objective).check") in {
        f.where for f in wrong(rehearsal) if f.kind == "sync"
    }


def test_a_scalar_of_the_host_is_noted(plant: Callable) -> None:
    """Fault: a number that torch hands over is called wrong, or passes unseen."""
    plant(lambda x: x * torch.tensor(2.0))
    rehearsal, _ = rehearsed()
    assert wrong(rehearsal) == []
    assert found(rehearsal.findings, "host scalar") == {"aten::mul.Tensor": CALL}


# --- Collectives ---------------------------------------------------------------------------------


@pytest.fixture
def two_ranks():
    """torch's fake process group: rank 0 of 2, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_collectives_of_two_ranks(two_ranks: None) -> None:
    """Faults: one not seen; bytes or dtype of another; a documented one called extra.

    Of the toy: one denominator, then gradients; 2 bytes a bf16 weight would be half of float32's.
    """
    rehearsal, looks = rehearsed()
    assert wrong(rehearsal) == []
    first, *gradients = looks.collectives.of_last_step()
    assert (first.name, first.dtype, first.bytes) == ("allreduce", "float32", 4)
    assert first.group.endswith("(2)")
    assert {(c.name, c.dtype) for c in gradients} == {("allreduce", "float32")}
    weights = sum(p.numel() for p in toy_draft().parameters())
    assert sum(c.bytes for c in gradients) == 4 * weights


def toy_draft():
    from rehearsal_toys import toy_config

    from torch_port.models.dspark import DSparkDraft

    return DSparkDraft(toy_config())


def test_an_extra_collective_is_found(plant: Callable, two_ranks: None) -> None:
    """Faults: a collective in a model file passes; one of bools passes (field-note 35)."""

    def reduces(x: Tensor) -> Tensor:
        flag = torch.ones(1, dtype=torch.bool, device=x.device)
        dist.all_reduce(flag)
        return x

    plant(reduces)
    rehearsal, looks = rehearsed()
    assert found(wrong(rehearsal), "extra collective") == {"c10d::allreduce_.default": CALL}
    assert found(wrong(rehearsal), "collective dtype") == {"c10d::allreduce_.default": CALL}
    planted = [c for c in looks.collectives.of_last_step() if c.where == CALL]
    assert [(c.dtype, c.bytes, c.phase) for c in planted] == [("bool", 1, "step 2: forward")]


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
def test_a_clean_run_has_no_finding(compute: dict, changes: dict) -> None:
    """Faults: a false alarm; the documented sync not told, or told more than once a step."""
    rehearsal, _ = rehearsed(toy_run(**compute), **changes)
    assert wrong(rehearsal) == []
    (sync,) = (f for f in rehearsal.findings if f.kind == "sync")
    assert sync.where == line_of(training_step, ".tolist()")
    assert sync.count == 2  # steps
