"""Decoding with given draws: same uniforms, same order, hence the same tokens (spec sheet §10).

A decoding case brings its target as tables, `toy/logits` [V, V] and `toy/hidden_states` [V, L·H]:
the row of a token is what the target says after reading it, whatever came before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parity.cases import Case, as_dtype
from parity.sides import Answer, spec_draft


def spec_decoding(case: Case, dtype: str) -> Answer:
    """Answer a decoding case with the spec: tokens, and what each round proposed and accepted."""
    import jax.numpy as jnp

    from jaxdraft.decoding import DecodingConfig, TargetPass, speculate
    from jaxdraft.drafting import dspark_drafter

    config, params, target, vocabulary = spec_draft(case, dtype)
    arrays = as_dtype(case.tensors, dtype)
    logits, states = jnp.asarray(arrays["toy/logits"]), jnp.asarray(arrays["toy/hidden_states"])
    settings: dict[str, Any] = dict(case.extra["decoding"])
    outcome = speculate(
        lambda tokens: TargetPass(logits[tokens], states[tokens]),
        dspark_drafter(config, params, target, vocabulary),
        jnp.asarray(case.tensors["prompt"]),
        DecodingConfig(**settings),
        jnp.asarray(arrays["draws"]),
    )
    rounds = np.array([[r.proposed, r.accepted, len(r.committed)] for r in outcome.rounds])
    accepted, proposed = rounds[:, 1].sum(), rounds[:, 0].sum()
    return Answer(
        loss=float(rounds[:, 2].mean()),  # a decoding case's number: tokens per round
        metrics={"accepted": (np.asarray(float(accepted)), np.asarray(float(proposed)))},
        tensors={"tokens": np.asarray(outcome.tokens), "rounds": rounds},
    )


def port_decoding(case: Case, dtype: str) -> Answer:
    """The port does not decode yet."""
    from torch_port.errors import NotBuiltError

    raise NotBuiltError("decoding is not built in the port")
