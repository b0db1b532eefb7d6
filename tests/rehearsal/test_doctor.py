"""`torch-port doctor`: what it says off an Ascend machine, what it catches on an emulated one."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from torch_port import device as seam
from torch_port.cli import app
from torch_port.device import NPU, PORTABLE, Card, Kernels, use_kernels
from torch_port.doctor import commands, environment, step
from torch_port.doctor.checks import Check, healthy
from torch_port.doctor.kernels import SMALL, check_kernels
from torch_port.doctor.ring import check_ring

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "port"))
from emulated_npu import emulated_torch_npu  # noqa: E402

CPU = torch.device("cpu")


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The strict emulation, which refuses float64 as the cards do."""
    module = emulated_torch_npu()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


# --- Off an Ascend machine -----------------------------------------------------------------------


def test_off_an_ascend_machine_each_line_says_what_is_missing(tmp_path: Path, monkeypatch) -> None:
    """Faults: a traceback; an exit status of 0; something missing without its remedy; the step
    not run where it can be."""
    for name in (*environment.CANN_ROOTS, "PYTORCH_NPU_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr(environment, "npu_version", lambda: None)
    result = CliRunner().invoke(app, ["doctor", "--json", str(tmp_path / "doctor.json")])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    told = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    assert told["healthy"] is False
    status = {(c["section"], c["name"]): c["status"] for c in told["checks"]}
    assert status["versions", "torch_npu"] == status["versions", "CANN"] == "missing"
    assert status["environment", "PYTORCH_NPU_ALLOC_CONF"] == "missing"
    assert status["devices", "cards"] == "missing"
    assert status["ring", "HCCL all-reduce"] == "skipped"
    kernels = {name for section, name in status if section == "kernels"}
    assert kernels == {"rms_norm", "rotary", "swiglu", "attention_chunk", "fused_adamw"}
    assert {status["kernels", name] for name in kernels} == {"skipped"}
    assert [status["step", n] for n in ("loss", "gradients", "gradient norm", "update")] == [
        "ok"
    ] * 4
    assert all(c["remedy"] for c in told["checks"] if c["status"] != "ok")
    assert 'pip install -e ".[npu]"' in result.output


def test_a_torch_npu_that_cannot_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an installed extra reported as fine although CANN's libraries are not found."""
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # an import that raises ImportError
    monkeypatch.setattr(environment, "npu_version", lambda: "2.13.0")
    check = by_name(environment.check_versions({}))["torch_npu"]
    assert check.status == "failed"
    assert "set_env.sh" in check.remedy
    monkeypatch.setattr(environment, "npu_version", lambda: "2.7.1")
    check = by_name(environment.check_versions({}))["torch_npu"]
    assert check.status == "failed"
    assert "2.7.1 beside torch 2.13.x" in check.found


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("version.cfg", "runtime_running_version=[7.3.0.1.231:8.0.RC2]\n", "8.0.RC2"),
        ("compiler/version.info", "Version=8.1.RC1\nversion_dir=8.1\n", "8.1.RC1"),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=x\nversion=8.0.0\n", "8.0.0"),
    ],
)
def test_cann_version_of_its_files(tmp_path: Path, file: str, text: str, expected: str) -> None:
    """Fault: a version that is there and not found."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    check = by_name(environment.check_versions({"ASCEND_HOME_PATH": str(tmp_path)}))["CANN"]
    assert check.status == "ok"
    assert check.found.startswith(expected)


def test_variables_that_change_a_run_are_shown() -> None:
    """Faults: HCCL's variables not shown; another allocator setting taken for the right one."""
    checks = environment.check_variables(
        {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64", "HCCL_CONNECT_TIMEOUT": "600"}
    )
    found = by_name(checks)
    assert found["PYTORCH_NPU_ALLOC_CONF"].status == "missing"
    assert "expandable_segments:True" in found["PYTORCH_NPU_ALLOC_CONF"].remedy
    assert found["HCCL_*"].found == "HCCL_CONNECT_TIMEOUT=600"


# --- Cards ---------------------------------------------------------------------------------------


def test_cards_and_their_memory(monkeypatch: pytest.MonkeyPatch, npu: ModuleType) -> None:
    """Faults: total and free memory exchanged; a card that another process fills passes."""
    GiB = 2**30
    memory = [(60 * GiB, 64 * GiB), (10 * GiB, 64 * GiB)]  # (free, total), as mem_get_info says

    class Runtime:
        device_count = staticmethod(lambda: 2)
        mem_get_info = staticmethod(lambda index: memory[index])
        get_device_name = staticmethod(lambda index: f"Ascend910B3 {index}")

    monkeypatch.setattr(torch, "npu", Runtime, raising=False)
    assert seam.npu_cards()[1] == Card("Ascend910B3 1", 64 * GiB, 10 * GiB)
    monkeypatch.setattr(environment, "npu_version", lambda: "2.13.0")
    checks, cards = environment.check_cards()
    assert len(cards) == 2
    assert [check.status for check in checks] == ["ok", "failed"]
    assert "64.0 GiB" in checks[0].found
    assert "npu-smi" in checks[1].remedy


def test_on_a_machine_with_cards_everything_runs(
    monkeypatch: pytest.MonkeyPatch, npu: ModuleType
) -> None:
    """Fault: a check that is defined and not run; a skipped line on a machine that could."""
    monkeypatch.setattr(environment, "npu_version", lambda: "2.13.0")
    cards = [Card("Ascend910B3", 2**36, 2**36)] * 2
    monkeypatch.setattr(environment, "npu_cards", lambda: cards)
    monkeypatch.setattr(environment, "environment", lambda: {"ASCEND_HOME_PATH": "/nowhere"})
    monkeypatch.setattr(seam, "device_named", lambda name: CPU)
    ring = [Check("ring", "all-reduce", "ok", "")]
    asked = []
    from torch_port.doctor import kernels
    from torch_port.doctor import ring as ring_module

    monkeypatch.setattr(ring_module, "check_ring", lambda *a: asked.append(a) or ring)
    monkeypatch.setattr(kernels, "check_kernels", lambda k, d: check_kernels(k, d, SMALL))
    checks = commands.diagnose()
    assert asked == [("hccl", 2)]
    assert {check.section for check in checks} == {
        *("versions", "environment", "devices", "ring", "kernels", "step")
    }
    wrong = [check.name for check in checks if check.status != "ok"]
    assert wrong == ["CANN", "PYTORCH_NPU_ALLOC_CONF"]
    assert not healthy(checks)


# --- Kernels beside their twins ------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [NPU, PORTABLE])
def test_right_kernels_pass(npu: ModuleType, kernels: Kernels) -> None:
    """Fault: tolerances that a right kernel does not keep, in float32 or bf16."""
    checks = check_kernels(kernels, CPU, SMALL)
    assert [check.name for check in checks if check.status != "ok"] == []
    assert len(checks) == 9  # four kernels in two dtypes, AdamW in float32
    expected = {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_fusion_attention"}
    assert (set(npu.calls) >= expected) == (kernels is NPU)


def swapped(original: Callable) -> Callable:
    def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
        return original(torch.cat(x.chunk(2, dim)[::-1], dim), dim)

    return npu_swiglu


def without_eps(original: Callable) -> Callable:
    return lambda x, gamma, epsilon: original(x, gamma + 0.05, epsilon)


def turned_back(original: Callable) -> Callable:
    return lambda x, r1, r2: original(x, r1, -r2)


def other_polarity(original: Callable) -> Callable:
    def npu_fusion_attention(*args, atten_mask: Tensor, **kwargs):
        return original(*args, atten_mask=~atten_mask, **kwargs)

    return npu_fusion_attention


def half_gradient(original: Callable) -> Callable:
    def npu_fusion_attention_grad(*args, **kwargs):
        dq, dk, dv, *rest = original(*args, **kwargs)
        return (dq, dk / 2, dv, *rest)

    return npu_fusion_attention_grad


@pytest.mark.parametrize(
    ("operator", "wrong", "kernel", "worst"),
    [
        ("npu_swiglu", swapped, "swiglu", "out|dgate|dup"),
        ("npu_rms_norm", without_eps, "rms_norm", "out|dx"),
        ("npu_rotary_mul", turned_back, "rotary", "out|dx"),
        ("npu_fusion_attention", other_polarity, "attention_chunk", "out|dq|dk|dv"),
        ("npu_fusion_attention_grad", half_gradient, "attention_chunk", "dk"),
    ],
)
def test_a_wrong_kernel_is_caught_and_named(
    npu: ModuleType, operator: str, wrong: Callable, kernel: str, worst: str
) -> None:
    """Faults: a wrong kernel passes; another kernel is blamed; a gradient is not looked at."""
    setattr(npu, operator, wrong(getattr(npu, operator)))
    checks = check_kernels(NPU, CPU, SMALL)
    failed = [check for check in checks if check.status == "failed"]
    assert [check.name for check in failed] == [f"{kernel} float32", f"{kernel} bfloat16"]
    for check in failed:
        assert any(f"({name})" in check.found for name in worst.split("|")), check.found
        assert check.remedy


def test_a_wrong_optimizer_is_caught(npu: ModuleType) -> None:
    """Fault: an AdamW kernel whose betas are exchanged passes."""
    right = npu.optim.NpuFusedAdamW

    def exchanged(params, betas, **settings):
        return right(params, betas=betas[::-1], **settings)

    npu.optim.NpuFusedAdamW = exchanged
    failed = [c.name for c in check_kernels(NPU, CPU, SMALL) if c.status == "failed"]
    assert failed == ["fused_adamw float32"]


def test_a_kernel_that_raises_leaves_the_others(npu: ModuleType) -> None:
    """Fault: one kernel's error ends the report, or is shown as a traceback."""

    def broken(*args, **kwargs):
        raise RuntimeError("EZ9999: Inner Error!\nTraceBack (most recent call last):")

    npu.npu_rotary_mul = broken
    checks = by_name(check_kernels(NPU, CPU, SMALL))
    assert checks["rotary float32"].status == "failed"
    assert checks["rotary float32"].found == "RuntimeError: EZ9999: Inner Error!"
    assert checks["swiglu float32"].status == "ok"


# --- The step ------------------------------------------------------------------------------------


def test_the_shipped_vector_is_the_specifications() -> None:
    """Fault: a copy that fell behind the specification's own set."""
    for name in ("case.json", "tensors.safetensors"):
        shipped = (ROOT / "torch_port" / "doctor" / "vector" / name).read_bytes()
        assert shipped == (ROOT / "tests" / "vectors" / "pruned-vanilla" / name).read_bytes()


def test_the_step_on_the_emulated_kernels(npu: ModuleType) -> None:
    """Fault: a step that is right on the kernels fails, or does not use them."""
    with use_kernels(NPU):
        checks = step.check_step(CPU)
    assert [check.status for check in checks] == ["ok"] * 4
    assert "npu_fusion_attention_grad" in npu.calls


@pytest.mark.parametrize(
    ("fault", "lines"),
    [
        ("loss", {"loss"}),
        ("gradient", {"gradients"}),
        ("rate", {"update"}),
    ],
)
def test_a_step_that_is_off_is_told(monkeypatch, fault: str, lines: set[str]) -> None:
    """Faults: a loss 1 % off passes; one parameter's gradient 1 % off; a rate twice the asked."""
    if fault == "loss":
        vector = step.shipped_vector()
        wrong = step.Vector(vector.config, vector.objective, vector.loss * 1.01, vector.tensors)
        monkeypatch.setattr(step, "shipped_vector", lambda: wrong)
    elif fault == "gradient":
        vector = step.shipped_vector()
        vector.tensors["expect/grad/layers.1.mlp.up_proj.weight"] *= 1.01
        monkeypatch.setattr(step, "shipped_vector", lambda: vector)
    else:
        from torch_port.training import step as training

        monkeypatch.setattr(training, "rate_at", lambda step, config: 2 * config.peak_rate)
    checks = step.check_step(CPU)
    assert lines <= {check.name for check in checks if check.status == "failed"}
    if fault == "gradient":
        assert "layers.1.mlp.up_proj.weight" in by_name(checks)["gradients"].found


# --- The ring ------------------------------------------------------------------------------------


def test_a_ring_of_two_processes() -> None:
    """Faults: ranks that never answer; a collective of training that is not tried."""
    checks = check_ring("gloo", 2, 1024)
    assert [check.status for check in checks] == ["ok"] * 5, checks
    assert {check.name for check in checks} == {
        *("all-reduce, float32", "broadcast, uint8", "all-gather, bfloat16"),
        *("reduce-scatter, float32", "all-reduce, bool"),
    }
    assert checks[0].found.startswith("2 ranks, 0.00391 MiB in ")  # 1024 of 4 bytes


def answered(monkeypatch: pytest.MonkeyPatch, *answer) -> list[Check]:
    done = subprocess.CompletedProcess([], *answer)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    return check_ring("hccl", 2)


WRONG = {"error": None, "got": [1.0], "expected": [3.0], "seconds": 1.0, "mib": 64.0}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((1, "", "a line\nRuntimeError: HCCL port 60000 in use\nmore"), "HCCL port 60000 in use"),
        ((0, "", ""), "no answer"),
        ((0, json.dumps({"all-reduce, float32": WRONG}), ""), "[1.0] came out, not [3.0]"),
        ((0, json.dumps({"broadcast, uint8": {"error": "HCCL: no uint8"}}), ""), "no uint8"),
    ],
)
def test_a_ring_that_does_not_close_is_told(monkeypatch, answer: tuple, said: str) -> None:
    """Faults: the ranks' own words lost; a wrong sum passes; a refused collective passes."""
    (check,) = answered(monkeypatch, *answer)
    assert check.status == "failed"
    assert said in check.found
    assert check.remedy


def test_a_ring_that_does_not_answer_is_told(monkeypatch) -> None:
    """Fault: the report waits without end for a rank that hangs."""

    def hangs(command, timeout, **kwargs):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    (check,) = check_ring("hccl", 2)
    assert check.status == "failed"
    assert "no answer within 180 s" in check.found


def test_a_refused_bool_is_no_fault(monkeypatch) -> None:
    """Fault: HCCL's refusal of bools fails a machine that trains (field-note 35)."""
    out = json.dumps({"all-reduce, bool": {"error": "HCCL: unsupported bool"}})
    (check,) = answered(monkeypatch, 0, out, "")
    assert check.status == "ok"
    assert check.found == "rejected (HCCL: unsupported bool); the port sends none"
