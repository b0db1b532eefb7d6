"""Random maps, sizes, checkpoints and ways of arriving: a right draft or a documented error.

The oracle is plain Python over lists: which map is legal, which one is in force, and so which ids
must come out. It knows nothing of the mixin's tables or versions.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from test_port_mapping import AlwaysBuffered, Toy
from torch import Tensor, nn
from toys import H, V, config, target

from torch_port.config import check_draft_vocab_size
from torch_port.errors import UserError
from torch_port.models.dspark import DSparkDraft

CASES = 2500
POISONED = "poisoned"  # the buffers hold no map that this draft may use

Map = tuple[Tensor, Tensor]
Kept = list[int]


def legal(pair: Map, V: int, K: int) -> Kept | None:
    """The kept ids of a right map, by the sheet's invariant; else None."""
    t2d, d2t = pair
    if t2d.dtype != torch.bool or d2t.dtype != torch.int64 or t2d.dim() != 1 or d2t.dim() != 1:
        return None
    bits, offsets = t2d.tolist(), d2t.tolist()
    if len(bits) != V or len(offsets) != K:
        return None
    kept = [v for v, bit in enumerate(bits) if bit]
    return kept if kept == [i + offset for i, offset in enumerate(offsets)] and kept else None


class Case:
    """One random draft, what it must say, and what happened to it."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.random, self.seen = np.random.default_rng(seed), seen
        self.V = int(self.random.integers(2, 12))
        self.pool: list[Map] = []

    def choose(self, *options: Any) -> Any:
        return options[int(self.random.integers(len(options)))]

    def run(self) -> None:
        given = self.draft_vocab_size()
        right = given is None or (type(given) is int and 1 <= given <= self.V)
        try:
            self.K = check_draft_vocab_size(given, self.V)
        except UserError:
            assert not right
            self.seen["bad size refused"] += 1
            return
        assert right
        family = self.choose(Toy, AlwaysBuffered)
        self.toy = family(self.V, self.K)
        self.buffered = self.K < self.V or family is AlwaysBuffered
        self.now: Kept | str | None = list(range(self.V)) if self.K == self.V else None
        self.known: Kept | None = self.now if self.buffered else None  # type: ignore[assignment]
        self.check()
        for _ in range(int(self.random.integers(1, 6))):
            self.choose(
                self.install, self.install, self.load, self.load, self.write, self.replace,
                self.clear, self.empty, self.move,
            )()  # fmt: skip
            self.check()

    def draft_vocab_size(self) -> object:
        if self.random.random() < 0.85:
            return int(self.random.integers(1, self.V + 1))
        return self.choose(None, 0, -1, self.V + 1, True, False, float(self.V), "1", [1])

    def map(self) -> Map:
        """A map, mostly right, sometimes one seen before, often broken in one of many ways."""
        if self.pool and self.random.random() < 0.4:
            return self.choose(*self.pool)
        size = self.K if self.random.random() < 0.85 else int(self.random.integers(0, self.V + 1))
        kept = np.sort(self.random.permutation(self.V)[:size])
        t2d = torch.from_numpy(np.isin(np.arange(self.V), kept))
        d2t = torch.from_numpy(kept.astype(np.int64) - np.arange(size))
        if self.random.random() < 0.45:
            t2d, d2t = self.broken(t2d, d2t, torch.from_numpy(kept.astype(np.int64)))
        self.pool.append((t2d, d2t))
        return t2d, d2t

    def broken(self, t2d: Tensor, d2t: Tensor, kept: Tensor) -> Map:
        noise = torch.from_numpy(self.random.integers(-2, self.V + 2, len(d2t)))
        shifted = d2t.clone()
        shifted[: 1 + int(self.random.integers(len(d2t) + 1))] += self.choose(-1, 1, self.V)
        return self.choose(
            (t2d, kept), (t2d.roll(1), d2t), (~t2d, d2t), (t2d, noise), (t2d, shifted),
            (t2d.int(), d2t), (t2d, d2t.int()), (t2d, d2t.double()), (t2d[:-1], d2t),
            (torch.cat([t2d, t2d]), d2t), (t2d, d2t[:-1]), (t2d, d2t.flip(0)), (t2d[None], d2t),
            (torch.zeros_like(t2d), torch.zeros_like(d2t)), (torch.zeros_like(t2d), d2t),
            (torch.ones_like(t2d), d2t), (t2d, torch.zeros_like(d2t)), (t2d.any(), d2t.sum()),
        )  # fmt: skip

    def accepts(self, kept: Kept | None) -> bool:
        return self.buffered and kept is not None and self.now in (None, kept)

    def install(self) -> None:
        pair = self.map()
        kept = legal(pair, self.V, self.K)
        try:
            self.toy.install_vocab_mapping(*pair)
        except UserError:
            assert not self.accepts(kept)
            self.seen["install refused"] += 1
            return
        # Over buffers that hold no usable map, a map that nothing contradicts may come in.
        mends = self.now == POISONED and kept is not None and self.known in (None, kept)
        assert self.accepts(kept) or mends
        self.now = self.known = kept
        self.seen["installed"] += 1

    def load(self) -> None:
        pair = self.map()
        kept = legal(pair, self.V, self.K)
        rows = self.K if self.random.random() < 0.9 else self.K + 1
        state = {"head": torch.zeros(rows, 1), "t2d": pair[0], "d2t": pair[1]}
        dropped = self.choose((), (), (), (), ("t2d",), ("d2t",), ("t2d", "d2t"))
        state = {name: x.clone() for name, x in state.items() if name not in dropped}
        never = not pair[0].any() and not pair[1].any() and self.now is None
        try:
            self.toy.load_state_dict(state, strict=self.choose(True, False),
                                     assign=self.choose(True, False))  # fmt: skip
        except UserError:
            assert dropped or not self.accepts(kept)
            self.seen["load refused"] += 1
        except RuntimeError as error:  # torch's own: missing keys, other shapes
            text = str(error)
            assert "Missing key" in text or "size mismatch" in text
            self.seen["load failed"] += 1
            if not dropped and self.accepts(kept):
                self.now = self.known = kept  # torch loads what fits, then raises
        else:
            if len(dropped) == 2 or (not dropped and never and self.buffered):
                self.seen["loaded without a map"] += 1
                return
            assert not dropped
            mends = self.now == POISONED and kept is not None and self.known in (None, kept)
            assert self.accepts(kept) or mends
            self.now = self.known = kept
            self.seen["loaded"] += 1

    def arrived(self, pair: Map) -> None:
        """What must follow when the buffers hold this, without a method called."""
        kept = legal(pair, self.V, self.K)
        if not pair[0].any():
            self.now = self.known = None
        elif kept is not None and self.known in (None, kept):
            self.now = self.known = kept
        else:
            self.now = POISONED

    def write(self) -> None:
        """In place, as a sharded load does."""
        pair = self.map()
        toy = self.toy
        if not self.buffered or pair[0].shape != toy.t2d.shape or pair[1].shape != toy.d2t.shape:
            return
        toy.t2d.copy_(pair[0])
        toy.d2t.copy_(pair[1])
        self.arrived((toy.t2d.clone(), toy.d2t.clone()))
        self.seen["written in place"] += 1
        if self.random.random() < 0.5:
            self.says_so()

    def replace(self) -> None:
        """By attribute, as from_pretrained does."""
        if not self.buffered:
            return
        pair = self.map()
        self.toy.t2d, self.toy.d2t = pair[0].clone(), pair[1].clone()
        self.arrived(pair)
        self.seen["replaced"] += 1
        if self.random.random() < 0.5:
            self.says_so()

    def says_so(self) -> None:
        if self.now == POISONED:
            with pytest.raises(UserError):
                self.toy.vocabulary_changed()
        else:
            self.toy.vocabulary_changed()

    def clear(self) -> None:
        if self.buffered and legal((self.toy.t2d, self.toy.d2t), self.V, self.K) is None:
            return  # of other shapes or types: replaced by attribute, not ours to fill
        self.toy.clear_vocab_buffers()
        if self.buffered:
            self.now = self.known = list(range(self.V)) if self.K == self.V else None

    def empty(self) -> None:
        """Through the meta device, wrapped or not."""
        if self.buffered and legal((self.toy.t2d, self.toy.d2t), self.V, self.K) is None:
            return
        self.toy.to("meta")
        (nn.Sequential(self.toy) if self.random.random() < 0.5 else self.toy).to_empty(device="cpu")
        if self.buffered:
            self.now = self.known = list(range(self.V)) if self.K == self.V else None
        self.seen["emptied"] += 1

    def move(self) -> None:
        self.toy = copy.deepcopy(self.toy).to(self.choose(torch.float32, torch.float64))

    def check(self) -> None:
        """Every way out of the draft gives the ids of the map in force, or raises."""
        toy, ids = self.toy, torch.arange(self.K)
        rows = torch.arange(self.V).view(-1, 1)
        if self.now is None or self.now == POISONED:
            for use in (
                lambda: toy.to_target_ids(ids),
                lambda: toy.draft_head(rows),
                toy.draft_vocab_index,
                toy.exported_vocabulary,
            ):
                with pytest.raises(UserError):
                    use()
            self.seen["use refused"] += 1
            return
        assert toy.to_target_ids(ids).tolist() == self.now
        assert toy.draft_head(rows)[:, 0].tolist() == self.now
        index = toy.draft_vocab_index().tolist()
        assert [index[v] for v in self.now] == list(range(self.K))
        assert index.count(-100) == self.V - self.K
        if self.buffered:
            offsets = toy.exported_vocabulary()["d2t"].tolist()
            assert [i + offset for i, offset in enumerate(offsets)] == self.now
        self.seen["decoded right"] += 1


@torch.no_grad()
def real_case(seed: int, seen: Counter[str]) -> None:
    """A DSpark draft given a map or a checkpoint; its greedy choice against a loop over ids."""
    case = Case(seed, seen)
    case.V, case.K = V, int(case.random.integers(1, V))
    generator = torch.Generator().manual_seed(seed)
    head = case.choose("vanilla", "gated")
    given = DSparkDraft(config(draft_vocab_size=case.K, markov_head_type=head)).double()
    given.initialise(generator)
    for parameter in given.parameters():
        parameter.mul_(30)  # the Markov term decides as often as the head does
    pair = case.map()
    kept = legal(pair, V, case.K)
    model = given
    try:
        if case.random.random() < 0.5:
            model.install_vocab_mapping(*pair)
        else:
            model = DSparkDraft(given.config).double()
            model.load_state_dict(given.state_dict() | {"t2d": pair[0], "d2t": pair[1]})
            model.require_vocabulary()
    except (UserError, RuntimeError):  # of these, torch's own: no map, of another shape
        assert kept is None
        seen["refused"] += 1
        return
    assert kept is not None
    U = target().lm_head
    hidden = torch.randn(8, 1, H, generator=generator, dtype=torch.float64)
    previous = torch.randint(0, V, (8, 1), generator=generator)  # target ids, kept or not
    e = model.embed_previous(previous)
    assert e is not None
    logits = model.logits(hidden, e, model.output_head(U))
    W1, W2 = model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight  # type: ignore[union-attr]
    for slot, got in enumerate(model.to_target_ids(logits.argmax(-1)).flatten().tolist()):
        h, w1 = hidden[slot, 0], W1[previous[slot, 0]]
        if head == "gated":
            gate = model.markov_head.gate_proj  # type: ignore[union-attr]
            w1 = torch.sigmoid(gate.weight @ torch.cat([h, w1]) + gate.bias) * w1
        scores = {v: float(U[v] @ h + W2[row] @ w1) for row, v in enumerate(kept)}
        assert got == max(scores, key=scores.__getitem__)
    seen["greedy choice right"] += 1


def test_never_a_wrong_id_from_a_real_draft() -> None:
    """Faults: rows of U, W2 or W1 of another id; draft ids emitted for target ids."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        real_case(seed, seen)
    assert min(seen["refused"], seen["greedy choice right"]) > 40, seen


def test_never_a_wrong_id() -> None:
    """Any accepted malformed or contradicting map, stale table or missed change shows here.

    The counts say that every outcome came up often: a fuzz that only ever refuses proves nothing.
    """
    seen: Counter[str] = Counter()
    for seed in range(CASES):
        try:
            Case(seed, seen).run()
        except Exception as error:
            raise AssertionError(f"case {seed}") from error
    assert min(seen.values()) > 40, seen
    assert len(seen) == 12, seen
