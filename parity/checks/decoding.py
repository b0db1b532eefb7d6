"""Decoding with given draws: same uniforms, same order, hence the same tokens (spec sheet §10).

A decoding case brings its target as tables, `toy/logits` [V, V] and `toy/hidden_states` [V, L·H]:
the row of a token is what the target says after reading it, whatever came before. `decoding` in
case.json holds `proposals`, `limit`, `end_of_text`, `temperature` and, where the case has them,
`tokenizer_size` (V_tok: the draft proposes no id from there up) and `confidence_threshold` (the
longest prefix whose Π σ(c) stays at or above it is verified). The target is not cut at V_tok.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from parity.cases import Array, Case, as_dtype
from parity.compare import Comparison, compare_answers
from parity.sides import Answer, port_draft, run_port, run_spec, spec_draft


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
