"""Decoding on both sides with the same uniforms: the same tokens, acceptances and corrections."""

import pytest

import torch_port.decoding as port
import torch_port.verification as verification
from parity.checks.decoding import compare_decoding, drawn_decoding


@pytest.mark.parametrize("asked", [{"proposals": 5}, {"proposals": 0}, {"tokenizer_size": 0}])
def test_both_refuse(asked: dict[str, object]) -> None:
    """Fault: more proposals than a block has, or none possible, drafted by one of the two."""
    assert (
        compare_decoding(drawn_decoding("vanilla", 3, 0.6, **asked), "float64").refusal is not None
    )


def test_what_one_side_refuses_is_no_agreement() -> None:
    """Fault: a check that passes whatever it could not compare."""
    case = drawn_decoding("vanilla", 3, 0.6)
    del case.tensors["toy/hidden_states"]
    problem = compare_decoding(case, "float64").problem
    assert problem is not None
    assert "port broke off" in problem


def test_the_check_tells_a_wrong_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a check that a program with other tokens passes: a residual that forgets q, say."""
    case = drawn_decoding("vanilla", 7, 0.6)
    assert compare_decoding(case, "float64").passes(0)
    monkeypatch.setattr(verification, "residual", lambda p, _: p)
    problem = compare_decoding(case, "float64").problem
    assert problem is not None
    assert problem.startswith("port [")
    monkeypatch.undo()
    monkeypatch.setattr(port, "_cut", lambda done, *_: done)
    assert not compare_decoding(case, "float64").passes(0)
