"""The two Ascend example runs, rehearsed as rank 0 of 64: nothing in them is wrong, and they fit.

Sizes, model, objective, optimizer and sharding are the files'; the first step is a short one, and
attention and objective work in fewer, larger pieces (`coarse`). That changes neither operators nor
lines, and the peak by less than 1 %: it has to stay 10 % below the limit.
"""

from pathlib import Path
from typing import Any

import pytest

from torch_port.rehearsal.flops import enclosing
from torch_port.rehearsal.rehearse import Rehearsal, rehearse
from torch_port.rehearsal.report import Looks, passes, report_of
from torch_port.run import load_run
from torch_port.training.build import read_draft

ROOT = Path(__file__).resolve().parents[2]
GiB = 2**30


@pytest.fixture(scope="module", params=["full", "k64000"])
def example(request: pytest.FixtureRequest) -> tuple[str, Rehearsal, Looks, dict[str, Any]]:
    """Rehearse an example once for all tests of this file."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(ROOT)  # the files name their draft from there
        run = load_run(Path(f"examples/qwen3.6-27b-{request.param}.yaml")).config
        looks = Looks.at("npu")
        rehearsal = rehearse(
            run,
            config=read_draft(run),
            world_size=64,
            observers=looks.observers(),
            coarse=True,
        )
    return request.param, rehearsal, looks, report_of(rehearsal, looks, {})


def of_the_tables(finding: dict[str, Any]) -> bool:
    """Rotary tables are made once for each power of two, and the first step is short here."""
    file, line = finding["where"].split(":")
    return enclosing(file, int(line)) == "rotary_tables"


def test_nothing_is_wrong_and_it_fits(example) -> None:
    """Faults: a CPU fallback, a host tensor, float64, a sync or an upload in every step, a shape
    that depends on values, a collective from elsewhere; a run that does not fit its cards."""
    _, rehearsal, _, report = example
    assert [f for f in report["findings"] if not of_the_tables(f)] == []
    assert rehearsal.memory.peak < 0.9 * rehearsal.usable
    assert passes(report | {"findings": []})


def test_the_only_sync_is_the_documented_one(example) -> None:
    """Fault: a second transfer that is taken for the step's own."""
    _, rehearsal, _, _ = example
    syncs = [f for f in rehearsal.findings if f.kind == "sync"]
    assert [(f.count, f.where.split(":")[0]) for f in syncs] == [(2, "torch_port/training/step.py")]


def test_operators_and_dtypes(example) -> None:
    """Faults: the portable branch rehearsed instead of the NPU's; a dtype that does not belong."""
    _, _, looks, report = example
    counts = {c.name: c.count for c in looks.operators.of_last_step()}
    assert set(report["operators"]["dtypes"]) == {"bfloat16", "float32", "bool", "int32", "int64"}
    assert set(report["operators"]["calls"]) == {"native", "by .out overload", "decomposed"}
    # Five layers: norms before attention and feed-forward, of q and twice of k, and two outside.
    assert counts["npu::npu_rms_norm.default"] == 5 * 5 + 2
    assert counts["npu::npu_swiglu.default"] == counts["npu::npu_swiglu_backward.default"] == 5
    calls = counts["npu::npu_fusion_attention.default"]
    assert calls == counts["npu::npu_fusion_attention_grad.default"] == 5 * 16


def test_collectives_are_the_documented_ones(example) -> None:
    """Fault: gradients in bf16, a layer gathered once too often, one collective more on pruning.

    `training.distribution`: 7 units, 5 of them layers, one micro-batch.
    """
    name, _, looks, _ = example
    told: dict[tuple[str, str], int] = {}
    for c in looks.collectives.of_last_step():
        told[c.name, c.dtype] = told.get((c.name, c.dtype), 0) + 1
    assert told == {
        ("allreduce", "float32"): 2 + (name == "k64000"),
        ("allgather_base", "bfloat16"): 7 + 5,
        ("reduce_scatter_base", "float32"): 7,
    }


def test_operations_by_hand(example) -> None:
    """Fault: a part of the step that is not counted, or not run at all.

    Of N·γ slots: gate, up and down of 5120 × 17408 in five layers, forward and twice back.
    """
    name, _, looks, _ = example
    slots = 16 * (512 if name == "full" else 1024)
    parts = looks.flops.by_part()
    assert parts["feed-forward"].products == 3 * 5 * 3 * 2 * slots * 5120 * 17408
    assert set(parts) >= {"attention", "projections", "objective", "heads", "norms", "optimizer"}


def test_what_is_always_there_by_hand(example) -> None:
    """Fault: sharded state counted whole, or not at all.

    Frozen: E and U, 248320 × 5120 in bf16. A rank's share: weights in bf16, masters and two moments
    in float32 of 1/64 of the draft.
    """
    name, rehearsal, _, _ = example
    by_category = rehearsal.memory.by_category
    frozen = 2 * 2 * 248320 * 5120
    tables = 0 if name == "full" else 64000 * 5120 * 2  # the kept rows of U
    assert by_category["frozen target tensors"] >= frozen + tables
    assert by_category["frozen target tensors"] < frozen + tables + 0.1 * GiB
    share = (1.858e9 if name == "full" else 1.811e9) / 64
    assert by_category["optimizer state"] == pytest.approx(12 * share + 4 * share, rel=0.02)
