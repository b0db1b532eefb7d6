"""What τ says of a draft and what decoding with it gives, where they differ (docs/spec.md).

Two tokens, blocks of two slots, one anchor. Acceptance in slot 1 depends on the token in slot 0.
Run: python examples/expected_length.py
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdraft.decoding import TargetPass
from jaxdraft.drafting import Drafter, Slot
from jaxdraft.expectation import expected_length
from jaxdraft.metrics import tau_probabilistic
from jaxdraft.objective import overlap

ANCHOR = 0
# What follows each context: after token 0 draft and target agree, after token 1 they are disjoint.
TARGET = {(0,): [0.75, 0.25], (0, 0): [0.5, 0.5], (0, 1): [1.0, 0.0]}
DRAFT = {(0,): [0.25, 0.75], (0, 0): [0.5, 0.5], (0, 1): [0.0, 1.0]}


def target(tokens: Int[Array, " seq"]) -> TargetPass:
    """Read the target's table; it has no states that the draft would look at."""
    context = tuple(tokens.tolist())
    rows = [jnp.log(jnp.array(TARGET[context[: s + 1]])) for s in range(len(context))]
    return TargetPass(jnp.stack(rows), jnp.zeros((len(context), 1)))


def drafter() -> Drafter:
    """Make a draft of its table; its state is what it has read."""

    def step(read: tuple[int, ...], previous: Int[Array, ""]) -> Slot:
        read = (*read, int(previous))
        return Slot(read, jnp.log(jnp.array(DRAFT[read])), None)

    return Drafter(lambda tokens, _: tuple(tokens.tolist()[:-1]), step, jnp.arange(2), slots=2)


def tau(after_anchor: int) -> Float[Array, ""]:
    """τ of §9 where the data has this token after the anchor: α of both slots, teacher-forced."""
    contexts = (ANCHOR,), (ANCHOR, after_anchor)
    q, p = (jnp.array([[[table[c] for c in contexts]]]) for table in (DRAFT, TARGET))
    blocks, count = tau_probabilistic(overlap(q, p), jnp.ones((1, 1, 2), bool))
    return blocks / count


def rows() -> list[tuple[str, float]]:
    """Return each number with what it is."""
    first = TARGET[(ANCHOR,)]
    no_states = jnp.zeros((0, 1))
    decoded = expected_length(target, drafter(), jnp.array([ANCHOR]), no_states, 2, 1.0)
    return [
        ("τ, where the data goes on with token 0", float(tau(0))),
        ("τ, where the data goes on with token 1", float(tau(1))),
        (
            "τ, mean over data that the target wrote",
            first[0] * float(tau(0)) + first[1] * float(tau(1)),
        ),
        ("expected length of a round", float(decoded)),
    ]


def table() -> str:
    """Return the rows as a Markdown table."""
    lines = ["| number | value |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value:.7g} |" for name, value in rows()])


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(table())
