"""Targets and drafts given by tables, and the enumeration of every path through decoding."""

import functools
from collections import defaultdict

import jax.numpy as jnp
import numpy as np

from jaxdraft import decoding, drafting
from jaxdraft.decoding import TargetPass
from jaxdraft.drafting import Drafter, Slot


@functools.cache
def row(seed, width, context):
    """Random logits that depend on every token of the context."""
    return jnp.asarray(np.random.default_rng([seed, *context]).normal(size=width))


def captured(tokens):
    """A state that tells which tokens were read: 1 and the tokens as digits."""
    return [[float(int("1" + "".join(map(str, tokens[: s + 1]))))] for s in range(len(tokens))]


def table_target(vocab, seed=0, look_up=None, dtype=float):
    """A causal target: its logits after a context are `look_up(context)`, in `dtype`."""
    look_up = look_up or (lambda context: row(seed, vocab, context))

    @functools.cache
    def pass_over(ids):
        logits = [look_up(ids[: s + 1]) for s in range(len(ids))]
        return TargetPass(jnp.stack(logits).astype(dtype), jnp.asarray(captured(ids)))

    return lambda tokens: pass_over(tuple(tokens.tolist()))


def table_drafter(kept, slots=9, seed=1000, look_up=None, confidence=None, dtype=float):
    """A draft whose logits (in `dtype`), and confidence logits, depend on context and prefix.

    It refuses captured states that are not those of the tokens before the anchor.
    """
    look_up = look_up or (lambda context: row(seed, len(kept), context))

    def begin(tokens, hidden_states):
        before = tokens.tolist()[:-1]
        assert hidden_states.tolist() == captured(before)
        return tuple(before)

    def step(state, previous):
        context = (*state, int(previous))
        c = None if confidence is None else jnp.asarray(confidence(context))
        return Slot(context, look_up(context).astype(dtype), c)

    return Drafter(begin, step, jnp.asarray(kept), slots)


class Paths:
    """Every path of decoding: a draw is the middle of one outcome's interval after another.

    The weights are products of interval lengths, so sums over all paths are exact expectations.
    The real `sample` and `accepts` decide, on numbers of `dtype`; that they do as the interval says
    is asserted.
    """

    def __init__(self, monkeypatch, dtype=float):
        real = decoding.sample, decoding.accepts
        # Asked with equal numbers again and again: the answers are kept.
        self._sample, self._accepts = (
            functools.cache(lambda *args, f=f: f(*(jnp.asarray(x, dtype) for x in args)).item())
            for f in real
        )
        monkeypatch.setattr(decoding, "sample", self.sample)
        monkeypatch.setattr(drafting, "sample", self.sample)
        monkeypatch.setattr(decoding, "accepts", self.accepts)

    def over(self, run):
        """(weight, the u's used, result) of every path of `run`."""
        scripts = [[]]
        while scripts:
            self.script, self.taken, self.weight, self.used = scripts.pop(), [], 1.0, []
            result = run()
            yield self.weight, self.used, result
            chosen = [choice for choice, _ in self.taken]
            for i in range(len(self.script), len(self.taken)):
                scripts += [[*chosen[:i], other] for other in range(1, self.taken[i][1])]

    def decide(self, outcomes):
        """outcomes: (value, lower end, length) of each interval."""
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else 0
        self.taken.append((choice, len(outcomes)))
        value, low, length = outcomes[choice]
        self.weight *= length
        self.used.append(low + length / 2)
        return value, self.used[-1]

    def sample(self, probabilities, u):
        p = np.asarray(probabilities)
        ends = np.cumsum(p)
        token, u = self.decide([(i, ends[i] - p[i], p[i]) for i in np.flatnonzero(p)])
        assert self._sample(tuple(p.tolist()), u) == token
        return jnp.asarray(token)

    def accepts(self, p, q, u):
        p, q = float(p), float(q)
        ratio = min(1.0, p / q)
        outcomes = [(True, 0.0, ratio), (False, ratio, 1 - ratio)]
        accepted, u = self.decide([outcome for outcome in outcomes if outcome[2] > 0])
        assert self._accepts(p, q, u) == accepted
        return jnp.asarray(accepted)


def outputs(weighted):
    """The distribution of (weight, value) pairs."""
    total = defaultdict(float)
    for weight, value in weighted:
        total[value] += weight
    return dict(total)


def softmax(logits, temperature=1.0):
    z = np.exp(np.asarray(logits) / temperature)
    return z / z.sum()


def target_process(target, prompt, limit, temperature=1.0, end_of_text=None):
    """What the target alone says: the probability of each continuation, token by token."""
    done, open_ = {}, {(): 1.0}
    for _ in range(limit):
        grown = {}
        for said, weight in open_.items():
            logits = target(jnp.asarray([*prompt, *said])).logits[-1]
            for token, p in enumerate(softmax(logits, temperature)):
                (done if token == end_of_text else grown)[(*said, token)] = weight * p
        open_ = grown
    return done | open_


def assert_same_distribution(got, expected):
    # Exact in exact numbers; sums of at most 1e4 products of a few probabilities: 1e4 · 1e-16.
    assert sum(expected.values()) > 1 - 1e-12
    for value in got.keys() | expected.keys():
        assert abs(got.get(value, 0.0) - expected.get(value, 0.0)) < 1e-12, value
