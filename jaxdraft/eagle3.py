"""The EAGLE3 draft and its training-time test (sheet §13), as flax.linen modules.

Shapes: batch B, sequence S, steps n, hidden H; `heads` query heads in groups per kv head, `dim`
the head size. An index t is where a slot stands in the sequence, whatever the step; the position
that a step reads there is further right. The objective is in `eagle3_objective`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxdraft.backbone import MLP, RMSNorm, linear, masked_softmax, rotate
from jaxdraft.blocks import at_positions, supervised
from jaxdraft.eagle3_config import Eagle3Config


class Eagle3Output(NamedTuple):
    """What the draft says at every index in every step: h = RMSNorm(state), and z."""

    hidden: Float[Array, "batch steps seq hidden"]
    logits: Float[Array, "batch steps seq kept"]


def read_positions(steps: int, seq: int) -> Int[Array, "steps seq"]:
    """The position whose token step i reads at index t: t+1+i, clamped to S−1.

    The teacher of that slot is the target's distribution at the same position: it has read what
    the draft reads and predicts the token behind it.

    Args:
        steps: n.
        seq: S.

    Returns:
        Positions in 0 … S−1 [steps seq].

    Source: sheet §13 ("shifted by i more"; "the teacher at index t").

    >>> read_positions(2, 4).tolist()
    [[1, 2, 3, 3], [2, 3, 3, 3]]
    """
    return jnp.minimum(_shifted(steps, seq, 1), seq - 1)


def label_positions(steps: int, seq: int) -> Int[Array, "steps seq"]:
    """Where the label of index t stands in step i: t+2+i, not clamped.

    Args:
        steps: n.
        seq: S.

    Returns:
        Positions, from S up where the label has left the sequence [steps seq].

    Source: sheet §13.

    >>> label_positions(2, 4).tolist()
    [[2, 3, 4, 5], [3, 4, 5, 6]]
    """
    return _shifted(steps, seq, 2)


def supervised_slots(
    loss_mask: Float[Array, "batch seq"], steps: int
) -> Bool[Array, "batch steps seq"]:
    """Which slots are supervised: label in range ∧ label supervised.

    Args:
        loss_mask: m [batch seq].
        steps: n.

    Returns:
        M [batch steps seq].

    Source: sheet §13.
    """
    batch, seq = loss_mask.shape
    labels_at = label_positions(steps, seq)
    inside = _over_rows(jnp.minimum(labels_at, seq - 1), batch)
    return _over_rows(labels_at <= seq - 1, batch) & at_positions(supervised(loss_mask), inside)


def leads_to_supervised(loss_mask: Float[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    """Which indices a supervised slot can see: those with a supervised label at t+2 or later.

    The others, the padding among them, change nothing; what is not read cannot bring in a NaN.

    Args:
        loss_mask: m [batch seq].

    Returns:
        Mask [batch seq].

    Source: sheet §13 (causality); field note 9.

    >>> leads_to_supervised(jnp.array([[0.0, 1.0, 0.0, 1.0, 0.0]]))[0].astype(int).tolist()
    [1, 1, 0, 0, 0]
    """
    on = supervised(loss_mask)
    seq = on.shape[1]
    behind = jnp.arange(seq)[None, :] >= jnp.arange(seq)[:, None] + 2
    return (on[:, None, :] & behind[None, :, :]).any(axis=-1)


def rotary_positions(steps: int, seq: int) -> Int[Array, "steps seq"]:
    """The rotary position of queries and keys at index t of step i: t+i.

    Args:
        steps: n.
        seq: S.

    Returns:
        Positions [steps seq].

    Source: sheet §13.
    """
    return _shifted(steps, seq, 0)


def visibility(steps: int, seq: int) -> Bool[Array, "queries steps seq"]:
    """What the query at index t of the last of `steps` steps sees.

    Of step 0 the keys at indices s ≤ t; of each later step, its own included, the key at s = t.

    Args:
        steps: how many steps there are so far, i+1.
        seq: S.

    Returns:
        Mask [queries steps seq], with as many queries as indices.

    Source: sheet §13.

    >>> visibility(2, 3)[1].astype(int).tolist()
    [[1, 1, 0], [0, 1, 0]]
    """
    query, key = jnp.arange(seq)[:, None, None], jnp.arange(seq)[None, None, :]
    first = (jnp.arange(steps) == 0)[None, :, None]
    return (first & (key <= query)) | (~first & (key == query))


def attend_steps(
    queries: Float[Array, "batch seq heads dim"],
    keys: Float[Array, "batch steps seq kv_heads dim"],
    values: Float[Array, "batch steps seq kv_heads dim"],
    visible: Bool[Array, "seq steps seq"],
) -> Float[Array, "batch seq heads dim"]:
    """Attention of the last step to all steps so far, scaled by dim^(−½).

    Query head i reads kv head ⌊i·kv_heads/heads⌋.

    Args:
        queries: of the last step [batch seq heads dim].
        keys: of every step so far [batch steps seq kv_heads dim].
        values: of every step so far [batch steps seq kv_heads dim].
        visible: `visibility` [seq steps seq].

    Returns:
        [batch seq heads dim].

    Source: sheet §13; §5 for scale and groups.
    """
    batch, seq, heads, dim = queries.shape
    steps, kv_heads = keys.shape[1], keys.shape[3]
    grouped = queries.reshape(batch, seq, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("btkgd,bjskd->btkgjs", grouped, keys) * dim**-0.5
    flat = scores.reshape(*grouped.shape[:4], steps * seq)
    sees = jnp.broadcast_to(visible.reshape(1, seq, 1, 1, steps * seq), flat.shape)
    weight = masked_softmax(flat, sees).reshape(scores.shape)
    return jnp.einsum("btkgjs,bjskd->btkgd", weight, values).reshape(queries.shape)


class Eagle3Attention(nn.Module):
    """The attention of the one layer, 2H wide into q, k and v; no norms of q and k."""

    config: Eagle3Config
    param_dtype: DTypeLike

    def setup(self) -> None:
        """Projections q, k, v [2H, …] and o."""
        config, dtype = self.config, self.param_dtype
        self.q_proj = linear(config, config.num_attention_heads * config.head_dim, dtype)
        self.k_proj = linear(config, config.num_key_value_heads * config.head_dim, dtype)
        self.v_proj = linear(config, config.num_key_value_heads * config.head_dim, dtype)
        self.o_proj = linear(config, config.hidden_size, dtype)

    def __call__(
        self, inputs: Float[Array, "batch steps seq pair"]
    ) -> Float[Array, "batch seq hidden"]:
        """q from the last step's inputs, k and v from those of every step so far, then o_proj.

        Nothing is kept between steps: the keys of earlier ones are computed again.

        Args:
            inputs: what each step so far reads [batch steps seq 2H].

        Returns:
            The last step's attention output [batch seq hidden].

        Source: sheet §13.
        """
        batch, steps, seq, _ = inputs.shape
        at, theta = _over_rows(rotary_positions(steps, seq), batch), self.config.rope_theta
        attention = attend_steps(
            rotate(self._heads(self.q_proj(inputs[:, -1])), at[:, -1], theta),
            rotate(self._heads(self.k_proj(inputs)), at, theta),
            self._heads(self.v_proj(inputs)),
            visibility(steps, seq),
        )
        return self.o_proj(attention.reshape(batch, seq, -1))

    def _heads(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows heads dim"]:
        return x.reshape(*x.shape[:-1], -1, self.config.head_dim)


class Eagle3Layer(nn.Module):
    """The one decoder layer: what a step reads, and what it makes of the states."""

    config: Eagle3Config
    param_dtype: DTypeLike

    def setup(self) -> None:
        """A norm for each half of the input, attention, and the MLP behind its norm."""
        config, dtype = self.config, self.param_dtype
        self.input_layernorm = RMSNorm(config.rms_norm_eps, config.hidden_size, dtype)
        self.hidden_norm = RMSNorm(config.rms_norm_eps, config.hidden_size, dtype)
        self.self_attn = Eagle3Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.rms_norm_eps, config.hidden_size, dtype)
        self.mlp = MLP(config, dtype)

    def read(
        self,
        embedded: Float[Array, "batch seq hidden"],
        states: Float[Array, "batch seq hidden"],
    ) -> Float[Array, "batch seq pair"]:
        """[RMSNorm(E[x_{t+1+i}]); RMSNorm(state_t)], the embedding first.

        Args:
            embedded: the embeddings of the tokens that the step reads [batch seq hidden].
            states: g in step 0, then the states of the step before [batch seq hidden].

        Returns:
            [batch seq 2H].

        Source: sheet §13.
        """
        return jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(states)], axis=-1)

    def __call__(
        self,
        states: Float[Array, "batch seq hidden"],
        inputs: Float[Array, "batch steps seq pair"],
    ) -> Float[Array, "batch seq hidden"]:
        """y = state + attention(inputs); y + mlp(norm(y)).

        Args:
            states: g in step 0, then the states of the step before [batch seq hidden].
            inputs: what each step so far reads, this one last [batch steps seq 2H].

        Returns:
            The step's states [batch seq hidden].

        Source: sheet §13.
        """
        y = states + self.self_attn(inputs)
        return y + self.mlp(self.post_attention_layernorm(y))


class Eagle3Draft(nn.Module):
    """The draft model. The embedding is the target's, frozen: an input, not a parameter.

    Attributes:
        config: what to build.
        param_dtype: dtype of freshly initialised parameters; the computation follows the
            parameters and inputs it is given.
    """

    config: Eagle3Config
    param_dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        """`fc`, `midlayer`, `norm` and the draft's own `lm_head` [H, K]."""
        config, dtype = self.config, self.param_dtype
        self.fc = linear(config, config.hidden_size, dtype)
        self.midlayer = Eagle3Layer(config, dtype)
        self.norm = RMSNorm(config.rms_norm_eps, config.hidden_size, dtype)
        self.lm_head = linear(config, config.draft_vocab_size, dtype)

    def __call__(
        self,
        target_states: Float[Array, "batch seq captured"],
        embedded: Float[Array, "batch steps seq hidden"],
    ) -> Eagle3Output:
        """The training-time test: g = Wfc·[f_low; f_mid; f_high], then step after step.

        Step i reads the states of step i−1 in the place of g, with their gradient. A step's z is
        head_K(RMSNorm(state)); the norm does not enter the next step.

        Args:
            target_states: F, the three captured layers [batch seq 3H].
            embedded: E of the tokens that each step reads [batch steps seq hidden].

        Returns:
            h [batch steps seq hidden] and z [batch steps seq kept] of every step.

        Source: sheet §13.
        """
        states, inputs, outputs = self.fc(target_states), [], []
        for step in range(embedded.shape[1]):
            inputs.append(self.midlayer.read(embedded[:, step], states))
            states = self.midlayer(states, jnp.stack(inputs, axis=1))
            outputs.append(states)
        h = self.norm(jnp.stack(outputs, axis=1))
        return Eagle3Output(hidden=h, logits=self.lm_head(h))


def _shifted(steps: int, seq: int, by: int) -> Int[Array, "steps seq"]:
    return jnp.arange(seq)[None, :] + jnp.arange(steps)[:, None] + by


def _over_rows(values: Array, batch: int) -> Array:
    return jnp.broadcast_to(values[None], (batch, *values.shape))
