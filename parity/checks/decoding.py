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
from parity.sides import Answer, port_draft, spec_draft


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
