"""EAGLE3 on both sides: names, cases drawn at random, and cases that would not tell."""

from dataclasses import replace

import numpy as np
import pytest
from vector_runs import OWN

from parity import emit as emitting
from parity.cases import Case, read_case
from parity.checks.eagle3 import port_eagle3_draft
from parity.checks.losses import cross_check
from parity.draw import draw_recipe
from parity.names import EAGLE3_TABLE, flax_path, to_flax, to_torch, torch_name
from parity.recipes import RECIPES, B, S
from parity.sides import Answer
from parity.vectors import answer_case, run_case

BY_NAME = {recipe.name: recipe for recipe in RECIPES if recipe.eagle3 is not None}


def random_case(name: str, seed: int, density: float = 0.8) -> Case:
    case = draw_recipe(BY_NAME[name], seed)
    mask = (np.random.default_rng(seed).random((B, S)) < density).astype(np.float32)
    return replace(case, tensors=case.tensors | {"batch/loss_mask": mask})


@pytest.mark.parametrize("bad_id", [-1, 10**6])
def test_what_is_not_supervised_changes_nothing_on_either_side(bad_id: int) -> None:
    """Fault (field-note 9): NaN of an unsupervised label's teacher, or an id of the padding.

    The same program on inputs that must not matter: equal to the bit.
    """
    case = random_case("eagle3-pruned", 7)
    on, at = case.tensors["batch/loss_mask"] > 0.5, np.arange(S)[None, :]
    last = S - 1 - on[:, ::-1].argmax(axis=1)
    teaches = (at >= 1) & np.pad(on[:, 1:], ((0, 0), (0, 1)))
    states = case.tensors["batch/target_last_hidden_states"]
    poisoned = {
        "batch/target_last_hidden_states": np.where(teaches[:, :, None], states, np.float32("nan")),
        "batch/input_ids": np.where(at < last[:, None], case.tensors["batch/input_ids"], bad_id),
    }
    assert np.isnan(poisoned["batch/target_last_hidden_states"]).any()
    for side in ("port", "spec"):
        clean = answer_case(case, side, "float64")
        dirty = answer_case(replace(case, tensors=case.tensors | poisoned), side, "float64")
        assert dirty.loss == clean.loss
        for name, gradient in clean.gradients.items():
            np.testing.assert_array_equal(dirty.gradients[name], gradient, err_msg=name)


def test_both_refuse() -> None:
    """Faults: a loss of 0 in place of a refusal; other words than the sheet's."""
    empty = random_case("eagle3-one-step", 1, density=0.0)
    outside = draw_recipe(BY_NAME["eagle3-nothing-inside"], 2)
    words = "no supervised target tokens", "no in-vocabulary target tokens"
    assert tuple(cross_check(case, "float64").refusal for case in (empty, outside)) == words


def test_names_go_both_ways_and_cover_both_models() -> None:
    """Faults: a parameter of one side only; a kernel not transposed; a table edited by half."""
    for rule in EAGLE3_TABLE:
        assert flax_path(rule.torch, EAGLE3_TABLE) == (rule.flax, rule.transpose)
        assert torch_name(rule.flax, EAGLE3_TABLE) == (rule.torch, rule.transpose)
        assert rule.transpose == rule.flax.endswith("/kernel")
    case = read_case(OWN / "eagle3-pruned")
    weights = case.group("weights")
    draft, _ = port_eagle3_draft(case, "float32")
    assert {name: tuple(p.shape) for name, p in draft.named_parameters()} == {
        rule.torch: weights[rule.torch].shape for rule in EAGLE3_TABLE
    }
    assert set(draft.state_dict()) == {*weights, "embed_tokens.weight"}  # contracts §4
    tree = to_flax({rule.torch: weights[rule.torch] for rule in EAGLE3_TABLE}, EAGLE3_TABLE)
    for name, value in to_torch(tree, EAGLE3_TABLE).items():
        np.testing.assert_array_equal(value, weights[name])
    # The DFlash family's drafts have no head of their own.
    with pytest.raises(KeyError, match="lm_head"):
        flax_path("lm_head.weight")


@pytest.mark.parametrize("side", ["port", "spec"])
def test_the_map_is_read_also_when_nothing_is_pruned(side: str) -> None:
    """Fault: K = V run without looking at the buffers; a case without them is incomplete."""
    case = random_case("eagle3-full-mha", 3)
    assert case.tensors["weights/t2d"].all()
    assert not case.tensors["weights/d2t"].any()
    without = {n: v for n, v in case.tensors.items() if n != "weights/t2d"}
    assert answer_case(replace(case, tensors=without), side, "float32").error is not None


@pytest.mark.parametrize("name", ["loss", "expect/grad/fc.weight", "expect/hidden"])
def test_a_wrong_expectation_fails(tmp_path, name: str) -> None:
    """Fault: an EAGLE3 case compared by its loss alone, or not at all."""
    case = read_case(OWN / "eagle3-one-step")
    spoiled = {n: v.copy() for n, v in case.tensors.items()}
    expect = dict(case.expect)
    if name == "loss":
        expect["loss"] += 1e-6
    else:
        at = (0, 0) if "grad" in name else tuple(np.argwhere(spoiled["expect/eval_mask"])[0])
        spoiled[name][at] += 1e-6
    metrics = {n: tuple(map(np.asarray, pair)) for n, pair in expect["metrics"].items()}
    answer = Answer(
        expect["loss"],
        metrics,
        {n.removeprefix("expect/grad/"): v for n, v in spoiled.items() if "/grad/" in n},
        {n.removeprefix("expect/"): v for n, v in spoiled.items() if n[:7] == "expect/"},
    )
    inputs = {n: v for n, v in case.tensors.items() if not n.startswith("expect/")}
    emitting._write(tmp_path / "case", replace(case, tensors=inputs), answer, None)
    assert run_case(OWN / "eagle3-one-step", ["port"], "float64").passes
    assert not run_case(tmp_path / "case", ["port"], "float64").passes


def test_a_weak_case_is_not_emitted() -> None:
    """Fault: an EAGLE3 vector in which a step counts nothing, or counts everything."""
    case = read_case(OWN / "eagle3-pruned")
    good = case.group("expect")

    def lacks(counted: list[float], mask: np.ndarray) -> str:
        pairs = {"in_vocabulary_step": (np.array(counted), np.array([9.0, 8.0, 7.0]))}
        with pytest.raises(RuntimeError, match="the case lacks") as told:
            emitting.check_eagle3(case, Answer(metrics=pairs, tensors={"eval_mask": mask}))
        return str(told.value).split("the case lacks ")[1]

    mask = good["eval_mask"]
    assert lacks([3, 0, 3], mask) == "a counted slot in every step"
    assert lacks([3, 8, 3], mask) == "a pruned choice in every step"
    assert lacks([3, 3, 3], np.ones_like(mask)) == "an unsupervised slot"


def hf_files() -> list[dict]:
    """A good config.json and others that lack a field or have a wrong or foreign one."""
    good = read_case(OWN / "eagle3-pruned").config | {"mlp_bias": False, "rope_scaling": None}
    wrong = [None, True, 0, -1, 2, 2.5, 10**6, "x", [], [0, 1, 2], {"rope_type": "yarn"}]
    changed = [good | {name: value} for name in (*good, "colour") for value in wrong]
    lacking = [{n: x for n, x in good.items() if n != name} for name in good]
    eagle = [good | {"eagle_config": good["eagle_config"] | {"x": 1}}]
    ids = "eagle_aux_hidden_state_layer_ids"
    eagle += [good | {"eagle_config": {ids: value}} for value in wrong]
    return [good, *lacking, *changed, *eagle]


def test_both_read_the_same_config_files() -> None:
    """Faults: a file that one side alone reads, or reads otherwise; a written file that the other
    refuses. Only the port tells a value of the wrong type from one that is not built."""
    from jaxdraft import Eagle3Config as Spec
    from jaxdraft import NotBuilt
    from torch_port.config_eagle3 import Eagle3Config as Port

    def read(side: type, raw: dict) -> dict | None:
        try:
            return dict(vars(side.from_hf(raw)))
        except (ValueError, NotBuilt):
            return None

    pairs = [(read(Port, raw), read(Spec, raw), raw) for raw in hf_files()]
    assert [raw for port, spec, raw in pairs if port != spec] == []
    accepted = [port for port, _, _ in pairs if port is not None]
    assert 12 < len(accepted) < len(pairs) / 2
    for values in accepted:
        written = Port(**values).to_hf()
        assert vars(Spec.from_hf(written)) == values
        assert Port.from_hf(written) == Port(**values)
