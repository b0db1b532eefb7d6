"""Drafting and the loop, with given uniforms: hand-computed, and the target's own output (§10)."""

import itertools
import math

import pytest
import torch
from decoding_toys import (
    DFLASH,
    drawn_draft,
    frozen,
    reading_target,
    round_paths,
    row,
    table_draft,
    table_target,
)
from eagle3_toys import eagle3_draft
from toys import KEPT, V

from torch_port.decoding import DecodingConfig, Round, draft_block, speculate
from torch_port.errors import NotBuiltError, UserError

BELOW_ONE = 1 - 2**-53
# Sums and products of at most 16 numbers of magnitude 1 in float64: a few 1e-16.
ROUNDING = 1e-14
BIG = 50.0  # a logit that leaves the others e⁻⁵⁰: as good as certain


# Drafting.


def test_markov_input_is_a_target_id_and_output_a_draft_id() -> None:
    """Fault: the drawn draft id fed to W1 unmapped (field note 28), or emitted unmapped.

    After target 9, draft id 3's own target, draft id 4 (target 12) is certain; after target 3 and
    4 (draft ids 1 and 2) draft id 0 is; elsewhere draft id 3.
    """
    table = {9: (0, 0, 0, 0, BIG), 3: (BIG, 0, 0, 0, 0), 4: (BIG, 0, 0, 0, 0)}
    table |= {token: (0, 0, 0, BIG, 0) for token in range(V) if token not in table}
    draft, target = table_draft(table, KEPT, V)
    states = torch.zeros(1, 16, dtype=torch.float64)
    block = draft_block(draft, target, torch.tensor([7, 5]), states, row(0.5, 0.5, 0.5, 0.5), 1.0)
    assert block.ids_M.tolist() == [9, 12, 9, 12]


def test_proposals_and_their_probabilities_by_hand() -> None:
    """Faults: q of draft ids where target ids belong; q at another temperature than was drawn."""
    log3 = math.log(3)
    table = {0: (0, log3), 2: (log3, 0), 3: (0, 0)}
    draft, target = table_draft(table, (2, 3), 5)
    nothing = torch.zeros(0, 16, dtype=torch.float64)
    block = draft_block(draft, target, torch.tensor([0]), nothing, row(0.2, 0.8, 0.4), 1.0)
    assert block.ids_M.tolist() == [2, 3, 2]  # 0.2 < 1/4; 0.8 ≥ 3/4; 0.4 < 1/2
    expected = torch.tensor([[0.25, 0.75], [0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    assert torch.allclose(block.q_MV[:, 2:4], expected, rtol=0, atol=ROUNDING)
    assert block.q_MV[:, [0, 1, 4]].abs().max() == 0
    halved = draft_block(draft, target, torch.tensor([0]), nothing, row(0.3), 0.5)
    assert halved.ids_M.tolist() == [3]  # logits doubled: 1/10 and 9/10
    greedy = draft_block(draft, target, torch.tensor([3]), nothing, row(0.9, 0.9), 0.0)
    assert greedy.ids_M.tolist() == [2, 2]  # the tie after 3 goes to the lower id


KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "none": {"markov_rank": 0, "confidence_head_with_markov": False},
    "dflash": DFLASH,
}


@pytest.mark.parametrize("kept", [(1, 2, 4), tuple(range(6))])
@pytest.mark.parametrize("kind", KINDS)
def test_slot_by_slot_is_the_teacher_forced_block(kind: str, kept: tuple[int, ...]) -> None:
    """Faults: the rnn's state begun anew in a slot; another slot's h; a confidence of other tokens.

    The expectation runs the whole block at once on the proposals as labels, as training does.
    """
    draft, target = drawn_draft(kept, 6, **KINDS[kind]), frozen(6)
    tokens = torch.tensor([5, 0, 3])
    states = reading_target(6)(tokens)[1]
    first = 1 if kind == "dflash" else 0
    n = 4 - first
    block = draft_block(draft, target, tokens, states, row(0.2, 0.7, 0.5, 0.9)[:n], 0.8)
    anchor, keep = torch.tensor([[2]]), torch.tensor([[True]])
    embedded = target.embed_tokens[torch.tensor([[[3, 1, 1, 1]]])]  # the mask token is 1
    hidden = draft.run_backbone(
        embedded, torch.tensor([[[2, 3, 4, 5]]]), states[None], anchor, keep, None
    )[:, :, first:]
    e = draft.embed_previous(torch.tensor([[[3, *block.ids_M[:-1].tolist()]]]))
    logits = draft.logits(hidden, e, target.lm_head[list(kept)])[0, 0]
    expected = (logits / 0.8).softmax(-1)
    assert torch.allclose(block.q_MV[:, list(kept)], expected, rtol=0, atol=ROUNDING)
    if kind == "dflash":
        assert block.confidence_M is None
    else:
        confidence = draft.confidence(hidden, e, detach=False)[0, 0]
        assert torch.allclose(block.confidence_M, confidence, rtol=0, atol=ROUNDING)


def test_a_block_has_all_its_slots_and_sees_the_context_alone() -> None:
    """Faults: a block cut to the proposals asked for; the anchor's own state seen, or no state."""
    draft, target = drawn_draft(KEPT, V), frozen(V)
    tokens = torch.tensor([5, 0, 3])
    states = reading_target(V)(tokens)[1]

    def drafted(states: torch.Tensor, n: int) -> torch.Tensor:
        return draft_block(draft, target, tokens, states, row(0.2, 0.7, 0.5, 0.9)[:n], 1.0).q_MV

    whole = drafted(states, 4)
    assert torch.equal(drafted(states, 2), whole[:2])
    assert torch.equal(drafted(states[:2], 4), whole)
    moved = states.clone()
    moved[2:] += 1
    assert torch.equal(drafted(moved, 4), whole)
    moved[1] += 1
    assert not torch.allclose(drafted(moved, 4), whole)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_ids_are_not_proposed(temperature: float) -> None:
    """Fault: ids that the tokenizer cannot produce proposed (field note 27), or still in q's sum.

    20 ids, 24 rows, the padding ones with logits of 100.
    """
    table = {token: [0.0] * 20 + [100.0] * 4 for token in range(24)}
    draft, target = table_draft(table, range(24), 24)
    nothing = torch.zeros(0, 16, dtype=torch.float64)
    block = draft_block(
        draft, target, torch.tensor([0]), nothing, row(0.0, 0.5, BELOW_ONE), temperature, 20
    )
    assert block.ids_M.tolist() == ([0, 10, 19] if temperature else [0, 0, 0])
    if temperature:
        assert torch.allclose(block.q_MV[:, :20], row(0.05), rtol=0, atol=ROUNDING)
    assert block.q_MV[:, 20:].abs().max() == 0
    pruned, target = table_draft({}, (3, 4), 6)
    with pytest.raises(UserError, match=r"tokenizer_size 3 leaves .* of its 2 kept ids is 3"):
        draft_block(pruned, target, torch.tensor([0]), nothing, row(0.0), 1.0, 3)


# The loop. A target and a draft that count: after t comes t + 1, round the clock of 6.

COUNTING = BIG * torch.eye(6, dtype=torch.float64).roll(1, 1)


def counting(**changes):
    return table_draft({t: COUNTING[t].tolist() for t in range(6)}, range(6), 6, **changes)


def ask(**changes) -> DecodingConfig:
    return DecodingConfig(**({"proposals": 3, "limit": 8, "temperature": 0.0} | changes))


def rounds_of(asked: DecodingConfig, draws=None, prompt=(4, 0), logits=COUNTING, **changes):
    draft, target = counting(**changes)
    done = speculate(table_target(logits), draft, target, list(prompt), asked, draws)
    assert done.tokens_T[: len(prompt)].tolist() == list(prompt)
    new = [token for done_round in done.rounds for token in done_round.committed]
    assert done.tokens_T[len(prompt) :].tolist() == new
    return list(done.rounds)


def test_the_limit_cuts_the_last_round() -> None:
    """Faults: tokens past the limit; statistics of what was cut (tokens per round would be off)."""
    assert rounds_of(ask(limit=4)) == [Round(3, 3, (1, 2, 3, 4))]
    whole = Round(3, 3, (1, 2, 3, 4))
    assert rounds_of(ask(limit=5)) == [whole, Round(1, 1, (5,))]
    assert rounds_of(ask(limit=7)) == [whole, Round(3, 3, (5, 0, 1))]
    wrong = COUNTING.clone()
    wrong[0] = BIG * torch.eye(6)[3]  # after 0 the target says 3, and a rejection is not cut
    assert rounds_of(ask(limit=1), logits=wrong) == [Round(3, 0, (3,))]


def test_an_end_of_text_ends_the_sequence_there() -> None:
    """Faults: tokens kept past it (field note 30); one that is corrected or a bonus overlooked.

    And: one of the prompt, or a rejected one, taken for the end.
    """
    assert rounds_of(ask(end_of_text=2)) == [Round(2, 2, (1, 2))]
    assert rounds_of(ask(end_of_text=3)) == [Round(3, 3, (1, 2, 3))]
    assert rounds_of(ask(end_of_text=4)) == [Round(3, 3, (1, 2, 3, 4))]
    wrong = COUNTING.clone()
    wrong[1] = BIG * torch.eye(6)[5]  # 2 is proposed after 1 and corrected to 5
    assert rounds_of(ask(end_of_text=5), logits=wrong) == [Round(3, 1, (1, 5))]
    assert rounds_of(ask(end_of_text=2, limit=3), logits=wrong) == [
        Round(3, 1, (1, 5)),
        Round(1, 1, (0,)),
    ]


def test_draws_have_their_places() -> None:
    """Faults: a correction or bonus read where the last round stopped reading; rows run on.

    After 1 the target says 2 or 5, evenly; the draft always 2, so it is accepted below 1/2.
    """
    split = COUNTING.clone()
    split[1, 5] = BIG
    draws = torch.full((8, 7), 0.9, dtype=torch.float64)
    sampled = ask(temperature=1.0, limit=4)
    draws[0, 4] = 0.4  # the acceptance of 2
    assert rounds_of(sampled, draws, logits=split) == [Round(3, 3, (1, 2, 3, 4))]
    draws[0, 4] = 0.6
    assert rounds_of(sampled, draws, logits=split)[0] == Round(3, 1, (1, 5))
    split[1] = COUNTING[1]
    split[0, 5] = BIG + math.log(9)  # after 0: 1 with 0.1, else 5
    draws[0] = row(0.9, 0.9, 0.9, 0.09, 0.9, 0.9, 0.9)
    draws[1] = row(0.0, 0.0, 0.0, 0.9, 0.9, 0.9, 0.9)
    assert rounds_of(sampled, draws, logits=split)[0] == Round(3, 3, (1, 2, 3, 4))


def test_truncation_skips_draws_and_moves_none() -> None:
    """Fault: a truncated round that takes its acceptances or its bonus from other places.

    σ(c) = 1/2 at every slot. The target is even between 1 and 5 after 0, and the bonus of a round
    truncated to one proposal comes from its answer to 1: 2, or 5 above 1/2.
    """
    split = COUNTING.clone()
    split[0, 5] = split[1, 5] = BIG
    draws = torch.full((8, 7), 0.9, dtype=torch.float64)
    draws[0, 3], draws[0, 6] = 0.4, 0.2  # accepts 1; the bonus is 2
    draft, target = counting()
    with torch.no_grad():
        for parameter in draft.confidence_head.parameters():
            parameter.zero_()
    for threshold, expected in (
        (0.5, Round(1, 1, (1, 2))),
        (0.6, Round(0, 0, (1,))),  # nothing verified: one token of the target's own, at 0.2
        (0.25, Round(2, 1, (1, 5))),  # 2 rejected at 0.9: what remains is 5
    ):
        asked = ask(temperature=1.0, limit=2, confidence_threshold=threshold)
        done = speculate(table_target(split), draft, target, [0], asked, draws)
        assert done.rounds[0] == expected


@pytest.mark.parametrize("kept", [(1, 2), tuple(range(4))])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets_own(kind: str, kept: tuple[int, ...]) -> None:
    """Fault: any token that the target alone would not have said, at temperature 0; draws matter.

    The target depends on every token read: a wrong token changes all that follow.
    """
    call = reading_target(4)
    tokens = torch.tensor([2, 0])
    for _ in range(20):
        tokens = torch.cat([tokens, call(tokens)[0][-1:].argmax(-1)])
    draft, target = drawn_draft(kept, 4, **KINDS[kind]), frozen(4)
    asked = ask(limit=20)
    done = speculate(call, draft, target, [2, 0], asked)
    assert done.tokens_T.tolist() == tokens.tolist()
    accepted = [done_round.accepted for done_round in done.rounds]
    assert min(accepted) == 0 < max(accepted)
    random = torch.rand(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert speculate(call, draft, target, [2, 0], asked, random).rounds == done.rounds


def test_a_block_sees_the_states_of_what_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: states of rejected proposals, or of an earlier round, before the next anchor."""
    draft, target, call = drawn_draft((1, 2), 4), frozen(4), reading_target(4)
    lengths = []

    def spy(draft, target, tokens, states, *rest):
        lengths.append(len(tokens))
        right = call(tokens)[1][:-1]
        assert torch.allclose(states[: len(right)], right, rtol=0, atol=ROUNDING)
        return draft_block(draft, target, tokens, states, *rest)

    monkeypatch.setattr("torch_port.decoding.draft_block", spy)
    speculate(call, draft, target, [2, 0], ask(limit=20))
    steps = {later - earlier for earlier, later in itertools.pairwise(lengths)}
    assert steps >= {1, 3}  # a block that was rejected whole, and one that was accepted in part


# Kept ids, the draft, the settings, and how many proposals the first round verifies.
CASES = {
    "vanilla": ((1, 3), {}, {}, {2}),
    "truncated": ((1, 3), {"markov_head_type": "rnn"}, {"confidence_threshold": 0.0065}, {1, 2}),
    "dflash": ((1, 2, 3), DFLASH, {"tokenizer_size": 3}, {2}),
}
SMALL = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


@pytest.mark.parametrize("name", CASES)
def test_the_output_distribution_is_the_targets(name: str) -> None:
    """Fault: any bias of drafting, acceptance, correction, truncation, or of a round's context.

    Every path of a round has the share of uniforms that the code itself gives it; the loop, given
    draws of that path, must commit its tokens. Summed over all paths, two new tokens have the
    target's own probability. 1e-12: some 100 shares, each right to 2⁻⁵², and exponentials.
    """
    kept, changes, settings, verified = CASES[name]
    draft, target = drawn_draft(kept, 4, **(changes | SMALL)), frozen(4)
    call = reading_target(4)
    asked = ask(proposals=2, temperature=0.7, **settings)
    total = torch.zeros(4, 4, dtype=torch.float64)
    lengths, proposed = set(), set()

    def follow(tokens: torch.Tensor, rows: list[list[float]], weight: float) -> None:
        onwards: dict[int, tuple[float, list[float]]] = {}
        for share, draws, committed in round_paths(call, draft, target, tokens, asked):
            made = [*tokens.tolist(), *committed][2:4]
            path = ask(proposals=2, temperature=0.7, limit=len(made), **settings)
            done = speculate(call, draft, target, [2, 0], path, row_stack([*rows, draws]))
            assert done.tokens_T[2:].tolist() == made
            lengths.add(len(committed))
            proposed.add(done.rounds[0].proposed)
            if len(made) == 2:
                total[tuple(made)] += weight * share
            else:
                before = onwards.get(made[0], (0.0, draws))[0]
                onwards[made[0]] = before + share, draws
        for token, (share, draws) in onwards.items():
            follow(torch.cat([tokens, torch.tensor([token])]), [*rows, draws], weight * share)

    prompt = torch.tensor([2, 0])
    follow(prompt, [], 1.0)
    first = (call(prompt)[0][-1] / 0.7).softmax(-1)
    for token in range(4):
        second = (call(torch.tensor([2, 0, token]))[0][-1] / 0.7).softmax(-1)
        assert torch.allclose(total[token], first[token] * second, rtol=0, atol=1e-12)
    assert lengths >= {1, 2}
    assert proposed == verified


def row_stack(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# What is refused.

UNIFORMS = torch.full((8, 7), 0.5)


@pytest.mark.parametrize(
    ("asked", "draws", "prompt", "message"),
    [
        ({"proposals": 7}, None, [0], "proposals is 7, but a dspark draft of block_size 4"),
        ({"end_of_text": 6}, None, [0], "end_of_text 6 is no id of the 6-row target"),
        ({"tokenizer_size": 7}, None, [0], "tokenizer_size 7 is more than the target's 6 rows"),
        ({}, None, [], "the prompt must be a row of at least one token id"),
        ({}, None, [0.5], "the prompt must be a row of at least one token id"),
        ({}, None, [0, 6], "the prompt holds id 6, no id of the 6-row target"),
        ({"temperature": 1.0}, None, [0], r"temperature 1\.0 needs draws: uniforms \[8, 7\]"),
        ({}, UNIFORMS[:, :5], [0], r"draws must be floating numbers \[rounds, 7\]"),
        ({}, UNIFORMS * 2, [0], r"draws must lie in \[0, 1\)"),
        ({}, UNIFORMS * math.nan, [0], r"draws must lie in \[0, 1\)"),
        ({}, UNIFORMS[:1], [0], r"draws hold 1 rows, .* give 8 rows \(limit\)"),
    ],
)
def test_what_does_not_fit_is_refused(asked, draws, prompt, message: str) -> None:
    """Fault: a raw error of torch, or tokens, for settings that do not fit together.

    Seven proposals of a shorter block among them (field note 29).
    """
    draft, target = counting()
    with pytest.raises(UserError, match=message):
        speculate(table_target(COUNTING), draft, target, prompt, ask(**asked), draws)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e-300}, "temperature 1e-300 is 0 in float32; write 0"),
        ({"temperature": math.nan}, "temperature"),
        ({"limit": 0}, "limit"),
        ({"confidence_threshold": 1.5}, "confidence_threshold"),
    ],
)
def test_settings_out_of_range_are_refused(asked, message: str) -> None:
    """Fault: a negative temperature that turns the distribution over, a limit of 0 that runs on."""
    with pytest.raises(UserError, match=message):
        ask(**asked)


def test_what_a_draft_or_target_cannot_do_is_refused() -> None:
    """Faults: a threshold without a confidence head ignored; another target's table indexed."""
    draft, target = counting(enable_confidence_head=False, confidence_head_with_markov=False)
    call = table_target(COUNTING)
    with pytest.raises(UserError, match=r"confidence_threshold is 0\.5, but this draft has no"):
        speculate(call, draft, target, [0], ask(confidence_threshold=0.5))
    with pytest.raises(UserError, match=r"the target gave logits \[1, 5\] for 1 tokens"):
        speculate(table_target(COUNTING[:, :5]), draft, target, [0], ask())
    with pytest.raises(UserError, match="the target's logits hold NaN"):
        speculate(table_target(COUNTING * math.nan), draft, target, [0], ask())
    none = torch.zeros(0, 16, dtype=torch.float64)
    with pytest.raises(UserError, match="anchor stands at position 1, but only 0 captured"):
        draft_block(draft, target, torch.tensor([0, 1]), none, row(0.5), 1.0)
    with pytest.raises(NotBuiltError, match="decoding with Eagle3Draft is not built"):
        speculate(call, eagle3_draft(), target, [0], ask())
    dflash = drawn_draft((1, 2), 6, **DFLASH)
    with pytest.raises(UserError, match=r"proposals is 4, but a dflash .* makes 1 to 3"):
        speculate(call, dflash, target, [0], ask(proposals=4))
