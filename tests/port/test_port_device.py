"""The NPU seam: each NPU branch, run on the CPU against an emulated torch_npu, equals its twin."""

import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from device_twins import TOLERANCE, assert_near, draws
from emulated_npu import RefusedError, emulated_torch_npu
from torch import Tensor
from torch.nn import functional as F

import torch_port
from torch_port import device
from torch_port.device import NPU, PORTABLE, Kernels, use_kernels
from torch_port.errors import UserError

ONES = torch.ones(2)


def with_gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weight = draws(tuple(out.shape), dtype=out.dtype, seed=9)[0]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


# --- Norm, rotation, gated unit ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_pointwise_kernels_equal_their_twins(npu: ModuleType, dtype: torch.dtype) -> None:
    """Faults: element 1 of npu_rms_norm's tuple (rstd), eps lost, cos and sin exchanged or sin
    negated, gate and up exchanged or joined on another axis, the gradient not passed on."""
    x, weight = draws((2, 3, 5, 8), (8,), dtype=dtype)
    angle = draws((2, 1, 5, 4), dtype=dtype, seed=1)[0].repeat(1, 1, 1, 2)
    gate, up = draws((2, 7, 6), (2, 7, 6), dtype=dtype, seed=2)
    eps = 0.3  # against a mean square of about 1, so that losing it shows
    cases = {
        "npu_rms_norm": (lambda k: lambda x, w: k.rms_norm(x, w, eps), [x, weight]),
        "npu_rotary_mul": (lambda k: lambda x: k.rotary(x, angle.cos(), angle.sin()), [x]),
        "npu_swiglu": (lambda k: k.swiglu, [gate, up]),
    }
    for name, (build, inputs) in cases.items():
        expected = with_gradients(build(PORTABLE), inputs)
        actual = with_gradients(build(NPU), inputs)
        for a, e in zip(actual, expected, strict=True):
            assert_near(a, e, TOLERANCE[dtype])
        assert npu.calls == [name]  # once, and the portable twin does not call it
        npu.calls.clear()


def test_pointwise_kernels_by_hand() -> None:
    """Fault: both twins wrong alike. RMS of (3, 4) is √12.5; silu(1)·2 = 2/(1 + e⁻¹). The
    rotation by hand is in test_port_attention.py."""
    one = torch.float64
    norm = device.rms_norm(
        torch.tensor([[3.0, 4.0]], dtype=one), torch.tensor([1.0, 10.0], dtype=one), 0.5
    )
    torch.testing.assert_close(
        norm, torch.tensor([[3 / math.sqrt(13), 40 / math.sqrt(13)]], dtype=one), rtol=1e-15, atol=0
    )
    gated = device.swiglu(torch.tensor([1.0], dtype=one), torch.tensor([2.0], dtype=one))
    assert gated.item() == pytest.approx(2 / (1 + math.exp(-1)), rel=1e-15)


@pytest.mark.parametrize("kernels", [PORTABLE, NPU])
def test_norm_of_bf16_states_with_float32_weights(npu: ModuleType, kernels: Kernels) -> None:
    """Faults: gamma of another dtype than x (refused by the NPU), or rounded to x's.

    x/√(9 + eps) = 0.997. Times 1 + 2⁻⁹ that is 0.9989, in bf16 1; a weight rounded to bf16 is 1 and
    the product 0.99609375, the nearest below.
    """
    x = torch.full((1, 4), 3.0, dtype=torch.bfloat16)
    out = kernels.rms_norm(x, torch.full((4,), 1 + 2**-9), 9 / 0.997**2 - 9)
    assert torch.equal(out, torch.ones(1, 4, dtype=torch.bfloat16))


# --- Attention -----------------------------------------------------------------------------------

A, R, Q, K, D = 6, 2, 8, 12, 4
SCALE = 0.37  # not D^−½: a kernel that takes its own scale shows


def attention_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, a gradient of the output, and a mask without symmetry that hides about half."""
    q, k, v, grad = draws(
        (1, A, Q, D), (1, R, K, D), (1, R, K, D), (1, A, Q, D), dtype=dtype, seed=3
    )
    hidden = torch.rand(Q, K, generator=torch.Generator().manual_seed(4)) < 0.5
    hidden[torch.arange(Q), torch.arange(Q)] = False
    return q, k, v, grad, hidden


def written_out(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Softmax over the visible keys, query by query, in Python floats."""
    out = torch.zeros_like(q)
    for head in range(A):
        kv = head * R // A
        for i in range(Q):
            visible = [s for s in range(K) if not hidden[i, s]]
            score = [SCALE * float(q[0, head, i] @ k[0, kv, s]) for s in visible]
            weight = [math.exp(x) for x in score]
            for w, s in zip(weight, visible, strict=True):
                out[0, head, i] += w / sum(weight) * v[0, kv, s]
    return out


@pytest.mark.parametrize("kernels", [PORTABLE, NPU])
def test_bool_additive_and_written_out_masks_agree(npu: ModuleType, kernels: Kernels) -> None:
    """Field-note 31, 8 queries and 12 keys. Faults: the mask's polarity, head i reading kv head
    i mod R, a scale of its own. float64 to 1e-12: see TOLERANCE."""
    q, k, v, _, hidden = attention_inputs(torch.float64)
    expected = written_out(q, k, v, hidden)
    additive = torch.zeros(Q, K, dtype=torch.float64).masked_fill(hidden, -math.inf)
    for mask in (~hidden, additive):  # torch's bool: True = visible
        sdpa = F.scaled_dot_product_attention(q, k, v, mask, scale=SCALE, enable_gqa=True)
        assert_near(sdpa, expected, 1e-12)
    out, _ = kernels.attention_chunk(q, k, v, hidden, SCALE)
    assert_near(out, expected, 1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernels", [PORTABLE, NPU])
def test_attention_gradients_against_autograd(
    npu: ModuleType, kernels: Kernels, dtype: torch.dtype
) -> None:
    """Faults: softmax_max and softmax_sum exchanged, a missing scale, dk and dv exchanged, kv
    gradients not summed over their query heads; against torch's own attention in float64."""
    q, k, v, grad, hidden = attention_inputs(dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, ~hidden, scale=SCALE, enable_gqa=True)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    out, stats = kernels.attention_chunk(q, k, v, hidden, SCALE)
    actual = kernels.attention_chunk_grad(q, k, v, hidden, SCALE, out, stats, grad)
    for a, e in zip((out, *actual), (expected.detach(), *gradients), strict=True):
        assert_near(a, e.to(dtype), TOLERANCE[dtype])
    assert npu.calls == (
        ["npu_fusion_attention", "npu_fusion_attention_grad"] if kernels is NPU else []
    )


@pytest.mark.parametrize("kernels", [PORTABLE, NPU])
def test_attention_in_bf16(npu: ModuleType, kernels: Kernels) -> None:
    """Fault: a softmax or its scores in bf16. Judged against float64 on the same bf16 inputs (§11).

    Scores reach 30 here; rounded to bf16 they would be off by 0.06, probabilities by 6 %. The
    output's own rounding is 2⁻⁹ = 0.2 %, a gradient's twice (O enters rounded): 1 % tells apart.
    """
    q, k, v, grad, hidden = attention_inputs(torch.bfloat16)
    q = q * 16
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, ~hidden, scale=SCALE, enable_gqa=True)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    out, stats = kernels.attention_chunk(q, k, v, hidden, SCALE)
    actual = kernels.attention_chunk_grad(q, k, v, hidden, SCALE, out, stats, grad)
    assert (out.dtype, *(x.dtype for x in actual)) == (torch.bfloat16,) * 4
    for a, e in zip((out, *actual), (expected.detach(), *gradients), strict=True):
        assert_near(a.double(), e, 1e-2)


@pytest.mark.parametrize("hides", [0, 3, K - 1])
@pytest.mark.parametrize("kernels", [PORTABLE, NPU])
def test_masks_that_hide_nothing_and_nearly_all(
    npu: ModuleType, kernels: Kernels, hides: int
) -> None:
    """Field-note 32's masks. Fault: NaN, or mass on a hidden key whose score is 1e4 higher."""
    q, k, v, grad, _ = attention_inputs(torch.float32)
    hidden = torch.arange(K).expand(Q, K) >= K - hides
    k = torch.where((torch.arange(K) >= K - hides)[:, None], k * 1e4, k)
    out, stats = kernels.attention_chunk(q, k, v, hidden, SCALE)
    dq, dk, dv = kernels.attention_chunk_grad(q, k, v, hidden, SCALE, out, stats, grad)
    seen = K - hides
    expected = F.scaled_dot_product_attention(
        q, k[:, :, :seen], v[:, :, :seen], scale=SCALE, enable_gqa=True
    )
    assert_near(out, expected, TOLERANCE[torch.float32])
    for gradient in (dk, dv):
        assert torch.equal(gradient[:, :, seen:], torch.zeros_like(gradient[:, :, seen:]))
    assert dq.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "BSDN"}, "layout"),
        ({"head_num": R}, "query's 6 heads"),
        ({"mask": torch.zeros(1, 1, Q, K)}, "bool or uint8"),
        ({"mask": torch.zeros(1, Q, K, dtype=torch.bool)}, "none of"),
        ({"mask": torch.ones(1, 1, Q, K, dtype=torch.bool)}, "masked whole"),
        ({"kv": 4}, "multiple of 4"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_the_emulation_refuses_what_the_documentation_does(changes: dict, message: str) -> None:
    """Fault: an emulation that forgives, so that every test above passes whatever is wired."""
    call = {"layout": "BNSD", "head_num": A, "kv": R, "dtype": torch.float32, "mask": None}
    call |= changes
    kv = call["kv"]
    q, k, v = draws((1, A, Q, D), (1, kv, K, D), (1, kv, K, D), dtype=call["dtype"])
    with pytest.raises(RefusedError, match=message):
        emulated_torch_npu().npu_fusion_attention(
            q, k, v, call["head_num"], call["layout"], atten_mask=call["mask"], sparse_mode=1
        )


# --- Selection -----------------------------------------------------------------------------------


def test_kernels_follow_the_device_and_the_override() -> None:
    """Faults: cuda sent to torch_npu; an override that outlives its block or an error in it."""

    def chosen(kind: str) -> Kernels:
        return device.kernels_for(SimpleNamespace(type=kind))  # type: ignore[arg-type]

    assert [chosen(kind) for kind in ("cpu", "cuda", "npu")] == [PORTABLE, PORTABLE, NPU]
    with use_kernels(NPU):
        with use_kernels(PORTABLE):
            assert chosen("npu") is PORTABLE
        assert chosen("cpu") is NPU
    with pytest.raises(ZeroDivisionError), use_kernels(NPU):
        raise ZeroDivisionError
    assert chosen("cpu") is PORTABLE


@pytest.mark.parametrize(
    "call", [lambda: device.device_named("npu:0"), lambda: NPU.swiglu(ONES, ONES)]
)
def test_missing_torch_npu_names_the_extra(monkeypatch: pytest.MonkeyPatch, call) -> None:
    """Fault: a ModuleNotFoundError, or torch's list of device types, for a missing extra."""
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(UserError, match=re.escape('pip install -e ".[npu]"')):
        call()


def test_a_name_that_is_no_device() -> None:
    """Fault: an error that does not name what was expected."""
    with pytest.raises(UserError, match="expected cpu, cuda, npu"):
        device.device_named("tpu-ish")


def test_torch_npu_is_named_in_one_file() -> None:
    """Fault: an operator called, or torch_npu imported, past the seam."""
    root = Path(torch_port.__file__).parent
    call = re.compile(r"(import|from) torch_npu|torch_npu\.\w|[\"']torch_npu|torch\.npu|ops\.npu")
    naming = [file for file in root.rglob("*.py") if call.search(file.read_text("utf-8"))]
    # The rehearsal stands in for torch_npu: it may name what it replaces.
    stand_in = {root / "rehearsal" / name for name in ("kernels.py", "virtual.py")}
    assert set(naming) - stand_in == {root / "device.py"}
    assert (root / "device.py").read_text("utf-8").count('import_module("torch_npu")') == 1
    assert "torch_npu" not in sys.modules  # importing the port does not ask for it
