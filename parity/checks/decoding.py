"""Decoding with given draws: same uniforms, same order, hence the same tokens (spec sheet §10).

A decoding case brings its target as tables, `toy/logits` [V, V] and `toy/hidden_states` [V, L·H]:
the row of a token is what the target says after reading it, whatever came before. `decoding` in
case.json holds `proposals`, `limit`, `end_of_text`, `temperature` and, where the case has them,
`tokenizer_size` (V_tok: the draft proposes no id from there up) and `confidence_threshold` (the
longest prefix whose Π σ(c) stays at or above it is verified). The target is not cut at V_tok.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from parity.cases import Array, Case, as_dtype
from parity.checks.base import Check, CheckResult, Measured, Plan
from parity.checks.drawn import Drawn, compare_drawn, counting
from parity.compare import Comparison, compare_answers
from parity.draw import draw_recipe
from parity.recipes import Recipe, V
from parity.sides import Answer, port_draft, run_port, run_spec, spec_draft
from parity.tolerances import EXACT


def spec_decoding(case: Case, dtype: str) -> Answer:
    """Answer a decoding case with the spec: tokens, and what each round proposed and accepted."""
    import jax.numpy as jnp

    from jaxdraft.config import DFLASH
    from jaxdraft.decoding import DecodingConfig, TargetPass, speculate
    from jaxdraft.drafting import dflash_drafter, dspark_drafter
    from jaxdraft.scheduling import confident_prefix

    config, params, target, vocabulary = spec_draft(case, dtype)
    arrays = as_dtype(case.tensors, dtype)
    logits, states = jnp.asarray(arrays["toy/logits"]), jnp.asarray(arrays["toy/hidden_states"])
    settings: dict[str, Any] = dict(case.extra["decoding"])
    tokenizer_size = settings.pop("tokenizer_size", None)
    threshold = settings.pop("confidence_threshold", None)
    if threshold is not None:
        settings["truncate"] = partial(confident_prefix, threshold=threshold)
    make = dflash_drafter if config.projector_type == DFLASH else dspark_drafter
    drafter = make(config, params, target, vocabulary, tokenizer_size)
    prompt = jnp.asarray(case.tensors["prompt"])
    longest = prompt.shape[0] + settings["limit"]

    def begin(tokens: Any, known: Any) -> Any:
        # A block does not see states at or after its anchor: of one length, they compile once.
        return drafter.begin(tokens, jnp.pad(known, ((0, longest - known.shape[0]), (0, 0))))

    outcome = speculate(
        lambda tokens: TargetPass(logits[tokens], states[tokens]),
        drafter._replace(begin=begin),
        prompt,
        DecodingConfig(**settings),
        jnp.asarray(arrays["draws"]),
    )
    rounds = np.array([[r.proposed, r.accepted, len(r.committed)] for r in outcome.rounds])
    return _answer(np.asarray(outcome.tokens), rounds)


def port_decoding(case: Case, dtype: str) -> Answer:
    """Answer a decoding case with the port, likewise."""
    import torch

    from torch_port.decoding import DecodingConfig, speculate

    draft, target = port_draft(case, dtype)
    arrays = as_dtype(case.tensors, dtype)
    logits, states, draws = (
        torch.from_numpy(arrays[name]) for name in ("toy/logits", "toy/hidden_states", "draws")
    )
    outcome = speculate(
        lambda tokens: (logits[tokens], states[tokens]),
        draft,
        target,
        torch.from_numpy(case.tensors["prompt"]),
        DecodingConfig(**case.extra["decoding"]),
        draws,
    )
    rounds = np.array([[r.proposed, r.accepted, len(r.committed)] for r in outcome.rounds])
    return _answer(outcome.tokens_T.numpy(), rounds)


def _answer(tokens: Array, rounds: Array) -> Answer:
    proposed, accepted, committed = rounds.T
    return Answer(
        loss=float(committed.mean()),  # a decoding case's number: tokens per round
        metrics={"accepted": (np.asarray(accepted.sum() * 1.0), np.asarray(proposed.sum() * 1.0))},
        tensors={"tokens": tokens, "rounds": rounds},
    )


def compare_decoding(case: Case, dtype: str) -> Comparison:
    """Compare the port's decoding of one case with the spec's: the numbers must be equal.

    Given the same uniforms, tokens (corrections and bonus tokens among them) and each round's
    proposed, accepted and committed counts are whole numbers: nothing is within a tolerance. In
    float64 the two would have to differ by rounding, about 1e-15, at a uniform within that of a
    boundary.

    Both refusing is agreement: `refusal` holds the port's words. What one side alone refuses, or
    breaks off at, is a problem.
    """
    port, spec = run_port(case, dtype, port_decoding), run_spec(case, dtype, spec_decoding)
    if port.failure == spec.failure == "refused":
        return Comparison(refusal=port.error)
    for side, answer in (("port", port), ("spec", spec)):
        if answer.error is not None:
            return Comparison(problem=f"{side} {answer.failure}: {answer.error}")
    result = compare_answers(port, spec)
    if not result.passes(0):
        result.problem = (
            f"port {_told(port)}; spec {_told(spec)}; rounds are [proposed, accepted, committed]"
        )
    return result


def _told(answer: Answer) -> str:
    return f"{answer.tensors['tokens'].tolist()} in {answer.tensors['rounds'].tolist()}"


# --- The suite's check --------------------------------------------------------------------------

NAME = "decoding"
QUICK, WHOLE = 6, 120  # random cases of each kind
PROPOSALS, LIMIT = 3, 12  # of every drawn case: one limit and one number of proposals share shapes
# A recipe's config and layout. The spec compiles once for each.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "vanilla": ({}, "dspark"),
    "gated": ({"markov_head_type": "gated"}, "dspark"),
    "rnn, unpruned": ({"markov_head_type": "rnn", "draft_vocab_size": None}, "dspark"),
    "no head": ({"confidence_head_with_markov": False}, "dspark"),
    "dflash": ({}, "dflash"),
    "dflash, unpruned": ({"draft_vocab_size": None}, "dflash"),
}


def drawn_decoding(kind: str, seed: int, agreement: float, **asked: Any) -> Case:
    """Draw a decoding case: weights, target, prompt and uniforms; `asked` are its settings."""
    config, layout = KINDS[kind]
    recipe = Recipe(kind, config, decoding={"limit": LIMIT}, layout=layout, agreement=agreement)
    case = draw_recipe(recipe, seed)
    if kind == "no head":  # the target still leans on the bias that the draft had
        nested = case.config["dflash_config"] | {"markov_rank": 0}
        rest = {name: value for name, value in case.tensors.items() if "markov_head" not in name}
        case = replace(case, config=case.config | {"dflash_config": nested}, tensors=rest)
    settings = {"proposals": PROPOSALS, "limit": LIMIT, "end_of_text": None, "temperature": 0.8}
    return replace(case, extra={"decoding": settings | asked})


_SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.8, 0.3, 2.0]),
        "agreement": st.sampled_from([1.0, 0.6, 0.3]),
        "end_of_text": st.none() | st.integers(0, V - 1),
        "tokenizer_size": st.sampled_from([None, None, 20, 32]),
        "confidence_threshold": st.sampled_from([None, None, 0.03, 0.2]),
    }
)


def _make(kind: str, seed: int, number: int, settings: dict[str, Any]) -> Case:
    """Make case `number` of a run's seed: greedy every fourth time, half of those with ties."""
    asked = {name: value for name, value in settings.items() if value is not None}
    agreement = asked.pop("agreement")
    if number % 4 == 0:
        asked["temperature"] = 0.0
    if number % 3 == 1:
        agreement = 1.0  # rounds of several tokens, for `_ending`
    if kind.startswith("dflash") and number % 8 != 5:
        asked.pop("confidence_threshold", None)  # both refuse it: there is no such head
    key = zlib.crc32(f"{kind}/{seed}/{number}".encode())
    case = drawn_decoding(kind, key, agreement, **asked)
    if number % 8 == 0:  # whole numbers: ties at temperature 0
        ties = {"toy/logits": np.round(case.tensors["toy/logits"])}
        case = replace(case, tensors=case.tensors | ties)
    weight = "weights/confidence_head.proj.weight"
    if number % 8 == 5 and weight in case.tensors:  # σ(0)² is the threshold to the last bit
        bias = "weights/confidence_head.proj.bias"
        zeros = {name: np.zeros_like(case.tensors[name]) for name in (weight, bias)}
        asked["confidence_threshold"] = 0.25
        case = replace(case, tensors=case.tensors | zeros)
    if number % 3 == 1:
        asked["end_of_text"] = _ending(case, 1 + number % 5)
    extra = {"decoding": case.extra["decoding"] | asked}
    return replace(case, name=f"{kind} #{number}", extra=extra)


def _ending(case: Case, steps: int) -> int:
    """Return the id that the target comes to in so many greedy steps: it often ends a text."""
    token = int(case.tensors["prompt"][-1])
    for _ in range(steps):
        token = int(case.tensors["toy/logits"][token].argmax())
    return token


def measure_decoding(case: Case, dtype: str = "float64") -> tuple[list[Measured], str]:
    """Return the comparisons of a case in the order of the rounds, and what was said."""
    compared = compare_decoding(case, dtype)
    if compared.refusal is not None:
        return [Measured(NAME, "refusal", 0.0, EXACT)], compared.refusal
    if not compared.errors["tensors"]:
        stage = f"an answer ({compared.problem})"
        return [Measured(NAME, stage, float("inf"), EXACT)], ""
    # Rounds before tokens: how many were accepted decides what stands where.
    return [
        Measured(NAME, name, compared.errors["tensors"].get(name, float("inf")), EXACT)
        for name in ("rounds", "tokens")
    ], compared.problem or ""


def run_decoding(plan: Plan) -> CheckResult:
    """Decode drawn cases on both sides with the same uniforms."""
    result, started = CheckResult(NAME), time.process_time()
    kinds = [kind for kind in KINDS if plan.wants(kind)]
    count = plan.count(QUICK, WHOLE)
    counted = counting(plan, count * len(kinds))
    for kind in kinds:
        drawn = Drawn(
            kind,
            _SETTINGS,
            partial(_make, kind, plan.seed),
            lambda case: measure_decoding(case)[0],
            tell=lambda case: measure_decoding(case)[1],
        )
        if compare_drawn({NAME: result}, drawn, plan, count, counted) and plan.first_only:
            break
    result.seconds = time.process_time() - started
    return result


CHECK = Check(
    NAME,
    "given the same uniforms in §10's order: the same tokens, and in every round the same numbers "
    "proposed, accepted, committed; greedy and sampled, pruned and not, with an end of text",
    ("§6", "§10"),
    run_decoding,
    (
        "EAGLE3, for which neither side decodes",
        "a uniform within rounding (1e-15) of a boundary, which none of the drawn ones is",
        "the distribution of the output: the specification's own tests enumerate it",
        "the port's caches on a device; the compared decoding is the plain one",
    ),
)
