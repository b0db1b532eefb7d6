"""Decoding on both sides with the same uniforms: the same tokens, acceptances and corrections."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_port.decoding as port
import torch_port.verification as verification
from parity.checks.decoding import KINDS, compare_decoding, drawn_decoding


@settings(max_examples=30)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 10_000),
    agreement=st.sampled_from([0.3, 0.6, 1.0]),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 2.0]),
    end_of_text=st.one_of(st.none(), st.integers(0, 39)),
    tokenizer_size=st.sampled_from([None, None, 20, 32]),
    threshold=st.sampled_from([None, None, 0.03, 0.2]),
    rounded=st.booleans(),
)
def test_the_same_uniforms_give_the_same_tokens(
    kind: str,
    seed: int,
    agreement: float,
    temperature: float,
    end_of_text: int | None,
    tokenizer_size: int | None,
    threshold: float | None,
    rounded: bool,
) -> None:
    """Fault: anything of §10 that the two read differently where no vector looks.

    Rounded logits make ties at temperature 0. A threshold for a draft without a confidence head is
    for both to refuse.
    """
    asked: dict[str, object] = {"temperature": temperature, "end_of_text": end_of_text}
    if tokenizer_size is not None:
        asked["tokenizer_size"] = tokenizer_size
    if threshold is not None:
        asked["confidence_threshold"] = threshold
    case = drawn_decoding(kind, seed, agreement, **asked)
    if rounded:
        ties = {"toy/logits": np.round(case.tensors["toy/logits"])}
        case = replace(case, tensors=case.tensors | ties)
    result = compare_decoding(case, "float64")
    assert result.passes(0), result.problem
    if result.refusal is not None:
        assert "confidence_threshold" in result.refusal or "tokenizer_size" in result.refusal


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
