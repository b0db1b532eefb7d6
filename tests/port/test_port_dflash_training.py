"""DFlash drafts in step, loop and evaluation, and the layout as part of their contract."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash_toys import FULL, OBJECTIVES, dflash_draft, dflash_hf, holed_batch, sums_of
from toys import G, S, V, batch, draft, target

from torch_port.config import BONUS_ANCHOR, DFlashObjectiveConfig, DraftConfig, ObjectiveConfig
from torch_port.data.batch import Batch, collate
from torch_port.errors import NotBuiltError, UserError
from torch_port.evaluation import evaluate
from torch_port.models.dflash import DFlashDraft
from torch_port.models.dspark import DSparkDraft
from torch_port.objective.dflash import batch_denominators, forward_batch, reduce_denominators
from torch_port.training.loop import train
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
from torch_port.training.step import accumulate_gradients, training_step

every_objective = pytest.mark.parametrize("kind", OBJECTIVES)
RATES = OptimizerConfig(peak_rate=3e-2, warmup_steps=2, total_steps=15)
# What a DSpark config says when it has no heads: the same weights as a DFlash draft's, by name.
HEADLESS = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}


def rows_of(whole: Batch) -> list[Batch]:
    return [
        Batch(**{n: None if v is None else v[i : i + 1] for n, v in vars(whole).items()})
        for i in range(len(whole.input_ids))
    ]


@every_objective
def test_accumulation_equals_one_batch(kind: str) -> None:
    """Faults: Σ w or B of each micro-batch by itself; a rank's W. float64, another order: 1e-12."""
    whole, frozen, results = holed_batch(), target(), []
    for micro_batches in ([whole], rows_of(whole)):
        model = dflash_draft()
        loss, den, ce_den, _ = accumulate_gradients(model, micro_batches, frozen, OBJECTIVES[kind])
        results.append((torch.stack([loss, den, ce_den]), dict(model.named_parameters())))
    (sums, one), (sums2, two) = results
    torch.testing.assert_close(sums2, sums, rtol=1e-12, atol=0)
    for name, parameter in one.items():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(
            two[name].grad, parameter.grad, rtol=0, atol=1e-12 * scale, msg=name
        )


@every_objective
def test_sums_run_over_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a rank's own sums; D-PACE's B of one rank; more than one collective per step."""
    model, b, reduced = dflash_draft(), holed_batch(), []

    def all_reduce(sums: torch.Tensor) -> None:
        reduced.append(sums.clone())
        sums *= 3  # two other ranks with the same batch

    local = batch_denominators(model, b, OBJECTIVES[kind])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    sums = reduce_denominators(model, local)
    assert len(reduced) == 1
    assert torch.stack([sums.den, sums.ce_den, sums.divisor]).tolist() == (3 * local).tolist()
    assert sums.divisor.item() == (3 * len(b.input_ids) if "decay" not in kind else sums.ce_den)


@every_objective
def test_evaluation_takes_batches_as_one(kind: str) -> None:
    """Faults: a mean of losses; the last batch's denominator. The rows hold unlike numbers."""
    model, whole, frozen = dflash_draft(), holed_batch(), target()
    loss = forward_batch(
        model, whole, frozen, OBJECTIVES[kind], sums_of(model, whole, OBJECTIVES[kind])
    ).loss
    assert loss is not None
    found = evaluate(model, rows_of(whole), frozen, OBJECTIVES[kind])
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert len(found["accept_position"]) == G - 1
    single = evaluate(model, rows_of(whole)[:1], frozen, OBJECTIVES[kind])
    assert single["loss"] != pytest.approx(loss.item(), rel=1e-3)


@every_objective
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("mask", "no supervised target tokens"),
        ("labels", "no in-vocabulary target tokens"),
        ("features", "gradient norm nan"),
    ],
)
def test_bad_step_is_one_error_and_touches_nothing(kind: str, spoil: str, words: str) -> None:
    """Faults: 0/0 written into the weights; D-PACE, whose B is never 0, training on nothing."""
    b = holed_batch()
    if spoil == "mask":
        b = replace(b, loss_mask=torch.zeros_like(b.loss_mask))
    elif spoil == "labels":
        b = replace(b, input_ids=torch.full_like(b.input_ids, 1))  # 1 is pruned
    else:
        b.hidden_states[0, 0, 0] = torch.nan
    model = dflash_draft()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = MasterAdamW(model.named_parameters(), RATES)
    with pytest.raises(UserError, match=words):
        training_step(model, optimizer, [b], target(), OBJECTIVES[kind], 1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert optimizer.moments() == {}
    if spoil != "features":
        with pytest.raises(UserError, match=words):
            evaluate(model, [b], target(), OBJECTIVES[kind])


@every_objective
def test_an_empty_micro_batch_takes_part(kind: str) -> None:
    """Field-note 15: no block kept, a loss of 0 and a gradient of 0 for every parameter."""
    b, model = holed_batch(), dflash_draft()
    empty = replace(b, block_keep_mask=torch.zeros_like(b.block_keep_mask))
    loss, *_ = accumulate_gradients(model, [empty, b], target(), OBJECTIVES[kind])
    assert math.isfinite(loss.item())
    outcome = forward_batch(
        model, empty, target(), OBJECTIVES[kind], sums_of(model, b, OBJECTIVES[kind])
    )
    assert outcome.loss is not None
    model.zero_grad()
    torch.autograd.backward(outcome.loss)
    assert outcome.loss.item() == 0
    assert all((p.grad == 0).all() for p in model.parameters())


@every_objective
def test_the_loop_trains_it(kind: str) -> None:
    """Fault: a step that leaves the weights alone, or goes up. 15 steps on one batch."""
    model, b, losses = dflash_draft(), holed_batch(), []
    train(model, [b] * 15, target(), OBJECTIVES[kind], RATES, lambda r, *_: losses.append(r))
    assert [report.step for report in losses] == list(range(1, 16))
    ce = [report.metrics["ce_position"][0].sum().item() for report in losses]
    assert ce[-1] < 0.7 * ce[0]


# --- The contract --------------------------------------------------------------------------------


def test_layouts_are_not_mistaken_for_each_other() -> None:
    """A DSpark draft without heads has the very names and shapes of a DFlash draft.

    Faults: either class built from the other's config; either's weights loaded into the other.
    """
    bonus, first = dflash_draft(), draft(**HEADLESS)
    assert {n: x.shape for n, x in bonus.state_dict().items()} == {
        n: x.shape for n, x in first.state_dict().items()
    }
    with pytest.raises(UserError, match=r"projector_type is 'dspark'.*anchor-first"):
        DFlashDraft(first.config)
    with pytest.raises(UserError, match=r"projector_type is 'dflash'.*bonus-anchor"):
        DSparkDraft(bonus.config)
    with pytest.raises(UserError, match="trained with anchor-first blocks"):
        bonus.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match="trained with bonus-anchor blocks"):
        first.load_state_dict(bonus.state_dict())
    again = dflash_draft(seed=9)
    again.load_state_dict(bonus.state_dict())
    assert torch.equal(again.fc.weight, bonus.fc.weight)
    with pytest.raises(RuntimeError, match="markov_head"):
        bonus.load_state_dict(dict(draft().state_dict()))


def test_batches_and_objectives_of_the_other_family_are_refused() -> None:
    """Faults: slots laid out for DSpark walked as DFlash's; an objective read as another one."""
    model, b, frozen = dflash_draft(), holed_batch(), target()
    with pytest.raises(UserError, match=r"laid out anchor-first.*laid_out\(4, 'bonus-anchor'\)"):
        forward_batch(model, b.laid_out(G), frozen, OBJECTIVES["decay"])
    assert b.laid_out(G, BONUS_ANCHOR).first(1).layout.block_layout == BONUS_ANCHOR
    with pytest.raises(UserError, match="dflash draft is trained with DFlashObjectiveConfig"):
        evaluate(model, [b], frozen, ObjectiveConfig())
    with pytest.raises(UserError, match="dspark draft is trained with ObjectiveConfig"):
        evaluate(draft(), [batch()], frozen, DFlashObjectiveConfig())
    with pytest.raises(UserError, match="Linear names no algorithm"):
        evaluate(torch.nn.Linear(1, 1), [b], frozen, ObjectiveConfig())


def test_the_loaders_layout_is_used() -> None:
    """Fault: `collate` lays out anchor-first for a DFlash draft; a step would stop, or sync."""
    g = torch.Generator().manual_seed(0)
    sample = {
        "input_ids": torch.randint(0, V, (S,), generator=g),
        "loss_mask": torch.ones(S, dtype=torch.float64),
        "hidden_states": torch.randn(S, 16, generator=g, dtype=torch.float64),
        "target_last_hidden_states": torch.randn(S, 8, generator=g, dtype=torch.float64),
    }
    how: dict[str, Any] = {"num_anchors": 4, "seed": 0, "epoch": 0, "vocab_size": V}
    b = collate([sample], [0], block_size=G, block_layout=BONUS_ANCHOR, **how)
    frozen, objective = target(), OBJECTIVES["both"]
    made = forward_batch(dflash_draft(), b, frozen, objective)
    found = forward_batch(dflash_draft(), replace(b, layout=None), frozen, objective)
    assert made.numerators > 0
    assert torch.equal(made.numerators, found.numerators)


def test_state_dict_has_a_map_only_when_pruned() -> None:
    """Faults: map keys in a full-vocabulary checkpoint; a pruned draft used before its map."""
    full = dflash_draft(**FULL)
    assert set(dflash_draft().state_dict()) - set(full.state_dict()) == {"t2d", "d2t"}
    bare = DFlashDraft(DraftConfig.from_hf(dflash_hf())).double()
    with pytest.raises(UserError, match="no vocabulary map is installed"):
        forward_batch(bare, holed_batch(), target(), OBJECTIVES["decay"])


def test_config_round_trip() -> None:
    """Faults: a field lost on the way out; heads written into a DFlash config."""
    for changes in ({}, FULL, {"markov_rank": 0}):
        config = DraftConfig.from_hf(dflash_hf(**changes))
        assert DraftConfig.from_hf(config.to_hf()) == config
        assert (config.projector_type, config.block_layout) == ("dflash", "bonus-anchor")
        assert config.predictions == G - 1
        assert config.to_hf()["architectures"] == ["DFlashDraftModel"]
        assert not any(
            "head" in name or "markov" in name for name in config.to_hf()["dflash_config"]
        )
    assert DraftConfig.from_hf(draft().config.to_hf()).predictions == G


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"markov_rank": 3}, "no Markov head"),
        ({"enable_confidence_head": True}, "no Markov head and no confidence head"),
        ({"block_size": 1}, "block_size 1 leaves"),
        ({"mask_token_id": V}, "mask_token_id"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    """Fault: a head that the config asks for and the draft does not have."""
    with pytest.raises(UserError, match=words):
        DraftConfig.from_hf(dflash_hf(**changes))


def test_an_architecture_of_the_other_draft_is_refused() -> None:
    """Fault: projector_type and architectures contradict each other, and one of them is ignored."""
    with pytest.raises(NotBuiltError, match="DSparkDraftModel"):
        DraftConfig.from_hf(dflash_hf(architectures=["DSparkDraftModel"]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dpace": "both", "loss_decay_gamma": 4.0}, "replaces the decay"),
        ({"dpace": None}, "dpace"),
        ({"dpace": "both", "beta": 0.0}, "beta"),
        ({"dpace": "both", "beta": 1.5}, "beta"),
        ({"beta": 0.5}, "beta 0.5 would be ignored, because dpace is 'none'"),
        ({"dpace": "none", "beta": 0.3}, "leave out beta, or set dpace to 'cumulative'"),
        ({"dpace": "suffix"}, "dpace"),
        ({"loss_decay_gamma": 0.0}, "loss_decay_gamma"),
        ({"ce_alpha": 0.1}, "ce_alpha"),
    ],
)
def test_objectives_that_do_not_fit_are_refused(values: dict[str, Any], words: str) -> None:
    """Fault: a setting that is ignored."""
    with pytest.raises(UserError, match=words):
        DFlashObjectiveConfig(**values)


def test_beta_is_there_with_dpace_alone() -> None:
    """Faults: another default than §12's 0.5; a recorded objective that is refused when read."""
    both = {dpace: DFlashObjectiveConfig(dpace=dpace).beta for dpace in ("cumulative", "both")}
    assert both == {"cumulative": 0.5, "both": 0.5}
    assert DFlashObjectiveConfig().beta is None
    for objective in OBJECTIVES.values():
        assert DFlashObjectiveConfig(**objective.model_dump()) == objective
