"""The Markov heads and the confidence head (sheet §6; paper Eq. 5–7), as flax.linen modules.

Each Markov head maps the previous tokens' embeddings e = W1[prev] and the hidden states h to a
bias on the draft logits. W1 is [V, r] and read with target ids; W2 is [K, r].
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxdraft.backbone import linear
from jaxdraft.config import DraftConfig


class MarkovHead(nn.Module):
    """W1 and W2, which every head type has, and the vanilla bias W2·e (paper Eq. 5–6)."""

    config: DraftConfig
    param_dtype: DTypeLike

    def setup(self) -> None:
        """`markov_w1` [V, r] and `markov_w2` [r, K]."""
        config, dtype = self.config, self.param_dtype
        self.markov_w1 = nn.Embed(
            config.vocab_size,
            config.markov_rank,
            embedding_init=nn.initializers.normal(config.initializer_range),
            param_dtype=dtype,
        )
        self.markov_w2 = linear(config, config.draft_vocab_size, dtype)

    def embed(self, previous: Int[Array, "*rows"]) -> Float[Array, "*rows rank"]:
        """e = W1[prev].

        Args:
            previous: previous tokens, **target** ids [*rows].

        Returns:
            e [*rows rank].
        """
        # Indexing clamps an id outside [0, V); nn.Embed's own call would return NaN, and a slot
        # that the mask drops may hold any id (field note 9).
        return self.markov_w1.embedding[previous]

    def __call__(
        self, e: Float[Array, "batch blocks γ rank"], h: Float[Array, "batch blocks γ hidden"]
    ) -> Float[Array, "batch blocks γ kept"]:
        """The bias W2·e.

        Args:
            e: previous tokens' embeddings [batch blocks γ rank].
            h: hidden states [batch blocks γ hidden]; unused by the vanilla head.

        Returns:
            The bias [batch blocks γ kept].
        """
        return self.markov_w2(e)


class GatedMarkovHead(MarkovHead):
    """The bias W2·(σ(Wg·[h; e] + bg) ⊙ e) (sheet §6)."""

    def setup(self) -> None:
        """W1, W2 and `gate_proj` [H + r, r]."""
        super().setup()
        self.gate_proj = linear(self.config, self.config.markov_rank, self.param_dtype, bias=True)

    def __call__(
        self, e: Float[Array, "batch blocks γ rank"], h: Float[Array, "batch blocks γ hidden"]
    ) -> Float[Array, "batch blocks γ kept"]:
        """The gated bias; arguments and result as in `MarkovHead`."""
        gate = nn.sigmoid(self.gate_proj(jnp.concatenate([h, e], axis=-1)))
        return self.markov_w2(gate * e)


class RnnMarkovHead(MarkovHead):
    """A recurrence along the block, s₀ = 0 (sheet §6).

    [g; c; o] = Wj·[s; e; h] + bj; s ← σ(g)⊙s + (1−σ(g))⊙tanh(c); bias W2·tanh(o).
    """

    def setup(self) -> None:
        """W1, W2 and `joint_proj` [2r + H, 3r], rows [s; e; h], columns gate, candidate, output."""
        super().setup()
        width = 3 * self.config.markov_rank
        self.joint_proj = linear(self.config, width, self.param_dtype, bias=True)

    def step(
        self,
        s: Float[Array, "batch blocks rank"],
        e: Float[Array, "batch blocks rank"],
        h: Float[Array, "batch blocks hidden"],
    ) -> tuple[Float[Array, "batch blocks rank"], Float[Array, "batch blocks kept"]]:
        """One slot: the next state and this slot's bias.

        Args:
            s: the state before the slot [batch blocks rank].
            e: the previous token's embedding [batch blocks rank].
            h: the slot's hidden state [batch blocks hidden].

        Returns:
            The state after the slot [batch blocks rank] and the bias [batch blocks kept].
        """
        joint = self.joint_proj(jnp.concatenate([s, e, h], axis=-1))
        g, c, o = jnp.split(joint, 3, axis=-1)
        gate = nn.sigmoid(g)
        return gate * s + (1 - gate) * jnp.tanh(c), self.markov_w2(jnp.tanh(o))

    def __call__(
        self, e: Float[Array, "batch blocks γ rank"], h: Float[Array, "batch blocks γ hidden"]
    ) -> Float[Array, "batch blocks γ kept"]:
        """The bias slot by slot; arguments and result as in `MarkovHead`."""
        s, biases = jnp.zeros_like(e[:, :, 0]), []
        for k in range(e.shape[2]):
            s, bias = self.step(s, e[:, :, k], h[:, :, k])
            biases.append(bias)
        return jnp.stack(biases, axis=2)


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
}


class ConfidenceHead(nn.Module):
    """One linear unit that predicts a slot's acceptance (paper Eq. 7)."""

    config: DraftConfig
    param_dtype: DTypeLike

    def setup(self) -> None:
        """`proj` [H + r, 1], or [H, 1] without the Markov embedding."""
        self.proj = linear(self.config, 1, self.param_dtype, bias=True)

    def __call__(
        self,
        h: Float[Array, "batch blocks γ hidden"],
        e: Float[Array, "batch blocks γ rank"] | None,
        detach: bool = False,
    ) -> Float[Array, "batch blocks γ"]:
        """The logit c; the probability is σ(c).

        Args:
            h: hidden states [batch blocks γ hidden].
            e: the raw W1[prev] [batch blocks γ rank], read when `confidence_head_with_markov`.
            detach: cut the gradient to both inputs (`detach_confidence`).

        Returns:
            c [batch blocks γ].

        Source: sheet §6, and §8 for detach.
        """
        inputs = h
        if self.config.confidence_head_with_markov:
            assert e is not None, "DraftConfig asks for a Markov rank here"
            inputs = jnp.concatenate([h, e], axis=-1)
        return self.proj(jax.lax.stop_gradient(inputs) if detach else inputs)[..., 0]
