"""Decoding on both sides with the same uniforms: the same tokens, acceptances and corrections."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_port.decoding as port
import torch_port.verification as verification
from parity.cases import Case
from parity.checks.decoding import compare_decoding
from parity.draw import draw_recipe
from parity.recipes import Recipe

# The spec compiles once for each of these; one limit and one number of proposals share shapes.
KINDS: dict[str, tuple[dict[str, object], str]] = {
    "vanilla": ({}, "dspark"),
    "gated": ({"markov_head_type": "gated"}, "dspark"),
    "rnn, unpruned": ({"markov_head_type": "rnn", "draft_vocab_size": None}, "dspark"),
    "no head": ({"confidence_head_with_markov": False}, "dspark"),
    "dflash": ({}, "dflash"),
    "dflash, unpruned": ({"draft_vocab_size": None}, "dflash"),
}
N, LIMIT = 3, 8


def drawn(kind: str, seed: int, agreement: float, **asked: object) -> Case:
    """A decoding case with drawn weights, target, prompt and uniforms."""
    config, layout = KINDS[kind]
    recipe = Recipe(kind, config, decoding={"limit": LIMIT}, layout=layout, agreement=agreement)
    case = draw_recipe(recipe, seed)
    if kind == "no head":  # the target still leans on the bias that the draft had
        nested = case.config["dflash_config"] | {"markov_rank": 0}
        rest = {name: value for name, value in case.tensors.items() if "markov_head" not in name}
        case = replace(case, config=case.config | {"dflash_config": nested}, tensors=rest)
    decoding = {"proposals": N, "limit": LIMIT, "end_of_text": None, "temperature": 0.8}
    return replace(case, extra={"decoding": decoding | asked})


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
    case = drawn(kind, seed, agreement, **asked)
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
    assert compare_decoding(drawn("vanilla", 3, 0.6, **asked), "float64").refusal is not None


def test_what_one_side_refuses_is_no_agreement() -> None:
    """Fault: a check that passes whatever it could not compare."""
    case = drawn("vanilla", 3, 0.6)
    del case.tensors["toy/hidden_states"]
    problem = compare_decoding(case, "float64").problem
    assert problem is not None
    assert "port broke off" in problem


def test_the_check_tells_a_wrong_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a check that a program with other tokens passes: a residual that forgets q, say."""
    case = drawn("vanilla", 7, 0.6)
    assert compare_decoding(case, "float64").passes(0)
    monkeypatch.setattr(verification, "residual", lambda p, _: p)
    problem = compare_decoding(case, "float64").problem
    assert problem is not None
    assert problem.startswith("port [")
    monkeypatch.undo()
    monkeypatch.setattr(port, "_cut", lambda done, *_: done)
    assert not compare_decoding(case, "float64").passes(0)
