"""What becomes of an operator on the NPU: the list, torch's own dispatch, and the example runs."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from rehearsal_toys import rehearsed, toy_config, toy_run
from torch.utils.flop_counter import FlopCounterMode

from torch_port.models.dspark import DSparkDraft
from torch_port.rehearsal.collectives import Collective, rows
from torch_port.rehearsal.flops import enclosing, part_of
from torch_port.rehearsal.operators import LIST, classify, listed_operators, tensors_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def toy():
    """One rehearsal of the toy, and its observers."""
    return rehearsed()


# --- The list ------------------------------------------------------------------------------------


def test_the_list_is_shipped_whole() -> None:
    """Faults: a list cut short, its comments taken for operators, or another version's."""
    assert (files("torch_port.rehearsal") / LIST).is_file()
    assert len(listed_operators()) == 1092
    assert not [name for name in listed_operators() if name.startswith("#") or " " in name]
    assert {"mm", "mm.out", "add.Tensor", "_foreach_lerp_.Scalar"} <= listed_operators()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm.default", "native"),
        ("aten::add_.Tensor", "native"),
        ("npu::npu_swiglu.default", "native"),
        ("aten::argmax.default", "by .out overload"),  # only argmax.out is listed
        ("aten::index_add_.default", "by .out overload"),  # in place: index_add.out
        ("aten::cumprod.default", "by .out overload"),
        ("aten::zeros_like.default", "decomposed"),
        ("aten::slice.Tensor", "decomposed"),
        ("aten::linear.default", "decomposed"),
        ("aten::select_backward.default", "decomposed"),  # no structured operator
        ("aten::special_bessel_j0.default", "CPU fallback"),  # structured; its .out is not listed
        ("aten::cholesky_inverse.default", "CPU fallback"),  # a kernel of each device's own
        ("aten::special_airy_ai.default", "CPU fallback"),
    ],
)
def test_what_becomes_of_an_operator(name: str, kind: str) -> None:
    """Faults: a prefix taken for a name; a functional form without a kernel called native."""
    assert classify(name) == kind


def test_what_torch_makes_of_other_operators_is_known() -> None:
    """Fault: a hand-written composite kernel taken for a structured operator without its .out.

    The reference is torch's own table of operators, which torchgen carries.
    """
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    key = "CompositeExplicitAutogradNonFunctional"
    written = [
        entry["func"].split("(")[0]
        for entry in yaml.load(table.read_text(), Loader=loader)
        if any(key in dispatch for dispatch in entry.get("dispatch") or {})
    ]
    assert len(written) > 40
    unlisted = [name for name in written if name not in listed_operators()]
    wrong = [n for n in unlisted if ".out" not in n and classify(f"aten::{n}") != "decomposed"]
    assert wrong == []


def test_tensors_in_lists_and_dicts_are_found() -> None:
    """Fault: foreach operators, whose tensors come in lists, looked at as having none."""
    a, b, c = (torch.zeros(n) for n in (1, 2, 3))
    found = tensors_of((a, [b, 1]), {"out": (c,)})
    assert [len(x) for x in found] == [1, 2, 3]


VIEWS = {
    *("alias", "detach", "expand", "permute", "select", "slice", "split", "t", "transpose"),
    *("unbind", "_unsafe_view", "lift_fresh", "squeeze", "unsqueeze"),
}
X = torch.randn(4, 6)
MADE_OF = {
    "full_like": lambda: torch.full_like(X, 2.0),
    "new_zeros": lambda: X.new_zeros(3),
    "scalar_tensor": lambda: torch.scalar_tensor(1.0),
    "select_backward": lambda: torch.ops.aten.select_backward(X[0], [4, 6], 0, 0),
    "slice_backward": lambda: torch.ops.aten.slice_backward(X[:2], [4, 6], 0, 0, 2, 1),
    "softmax": lambda: torch.softmax(X, -1, out=torch.empty_like(X)),
    "zeros_like": lambda: torch.zeros_like(X),
}


def test_a_decomposed_operator_of_the_step_consists_of_listed_ones(toy) -> None:
    """Fault: an unlisted operator inside one that torch decomposes, where no trace looks.

    What they consist of is seen by torch's profiler on the CPU, whose kernels are the same
    composites. Allocation and views are not asked of the list.
    """
    _, looks = toy
    counted = looks.operators.of_last_step()
    decomposed = {c.name.split("::")[1].split(".")[0] for c in counted if c.kind == "decomposed"}
    assert decomposed <= VIEWS | MADE_OF.keys()
    listed = {operator.split(".")[0] for operator in listed_operators()}
    allocation = {"empty", "new_empty", "empty_like", "empty_strided", "resize_"}
    harmless = VIEWS | allocation | {"as_strided", "to"}
    for name, call in MADE_OF.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        inside = {e.key.removeprefix("aten::") for e in profile.key_averages() if "::" in e.key}
        assert inside - listed - harmless - MADE_OF.keys() == set(), name


# --- Operations ----------------------------------------------------------------------------------


def test_operations_by_hand(toy) -> None:
    """Faults: a factor 2 lost, the backward pass not counted, a part charged with another's.

    Of the toy (H 16, inner 24, 16 slots, S 24, two captured layers): the feed-forward has three
    products of 2·16·16·24, three times over with its backward pass. The heads: confidence, 19
    inputs of each evaluated slot, at most 16.
    """
    _, looks = toy
    parts = looks.flops.by_part()
    assert parts["feed-forward"].products == 3 * 3 * 2 * 16 * 16 * 24
    # fc: 24 × 32 × 16, no gradient of its input; q and o: 16 rows, k and v: 16 + 24 rows of 8.
    fc = 2 * 2 * 24 * 32 * 16
    q_o = 3 * 2 * 2 * 16 * 16 * 16
    k_v = 3 * 2 * 2 * (16 + 24) * 16 * 8
    assert parts["projections"].products == fc + q_o + k_v
    assert parts["optimizer"].products == 0
    weights = sum(p.numel() for p in DSparkDraft(toy_config()).parameters())
    assert parts["optimizer"].elements > 4 * weights  # moments, root, division, update at least
    assert looks.flops.total() == sum(part.products for part in parts.values())


def test_operations_of_a_layer_that_is_computed_again() -> None:
    """Fault: what is computed again is charged to the line whose gradient asked for it.

    Of the feed-forward gate and up are computed again; down is not, whose result nothing keeps.
    Queries, keys, values and outputs are; fc stands before the layers.
    """
    _, looks = rehearsed(toy_run(recompute="layer"))
    parts = looks.flops.by_part()
    assert parts["feed-forward"].products == (3 * 3 + 2) * 2 * 16 * 16 * 24
    q_o, k_v = 2 * 2 * 16 * 16 * 16, 2 * 2 * (16 + 24) * 16 * 8
    assert parts["projections"].products == 2 * 2 * 24 * 32 * 16 + 4 * (q_o + k_v)


def test_products_as_torch_counts_them() -> None:
    """Fault: `mm.out`, `addmm_` or `bmm` counted by another formula, or not at all."""
    from torch_port.rehearsal.flops import product_operations
    from torch_port.rehearsal.trace import Trace

    class Sum:
        total = 0

        def before(self, call) -> None: ...

        def after(self, call) -> None:
            self.total += product_operations(call)

        def finding(self) -> list:
            return []

    a, b, c = torch.randn(3, 5), torch.randn(5, 7), torch.randn(3, 7)
    ours, batch = Sum(), torch.randn(2, 3, 5)
    with Trace([ours]):
        torch.mm(a, b, out=c)
        c.addmm_(a, b)
        torch.bmm(batch, batch.mT)
        torch.addmm(c[0], a, b)
    with FlopCounterMode(display=False) as theirs:
        torch.mm(a, b)
        torch.addmm(c, a, b)
        torch.bmm(batch, batch.mT)
        torch.addmm(c[0], a, b)
    assert ours.total == theirs.get_total_flops() == 3 * 2 * 3 * 5 * 7 + 2 * 2 * 3 * 5 * 3


def test_the_part_of_a_line() -> None:
    """Fault: a part named by file alone, so that projections and feed-forward are one."""
    file = "torch_port/models/backbone.py"
    lines = (ROOT / file).read_text(encoding="utf-8").split("\n")

    def at(text: str) -> str:
        return f"{file}:{1 + next(i for i, line in enumerate(lines) if text in line)}"

    assert part_of(at("swiglu(self.gate_proj")) == "feed-forward"
    assert part_of(at("self.fc(hidden_states_BSF)")) == "projections"
    assert part_of(at("return self.o_proj(")) == "projections"
    assert part_of("torch_port/objective/fused.py:300") == "objective"
    assert part_of("gradients summed (autograd)") == "other"
    assert enclosing(file, 1) == ""


# --- Collectives, put together --------------------------------------------------------------------


def test_like_collectives_are_put_together_in_order() -> None:
    """Faults: bytes of one for all; two phases in one row; the order lost."""
    a = Collective("step 2: backward", "allreduce", "0 (2)", "float32", 8, "a.py:1")
    b = Collective("step 2: forward", "allreduce", "0 (2)", "float32", 4, "a.py:1")
    told = [(row.phase, row.count, row.bytes) for row in rows([b, a, a])]
    assert told == [("forward", 1, 4), ("backward", 2, 16)]
