"""The vocabulary map: selection, buffers, the contract's refusals, files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import KEPT, V, draft, toy_map

from torch_port.config import DraftConfig
from torch_port.errors import UserError
from torch_port.models.dspark import DSparkDraft
from torch_port.vocabulary.counting import count_supervised_tokens
from torch_port.vocabulary.files import load_map, save_map
from torch_port.vocabulary.mapping import buffers_from_kept, check_map
from torch_port.vocabulary.selection import coverage, select_by_count


def counts(**by_id: int) -> np.ndarray:
    result = np.zeros(V, dtype=np.int64)
    for name, count in by_id.items():
        result[int(name[1:])] = count
    return result


def test_selection_by_hand() -> None:
    """Faults: ties to the higher id, pins not counted into K, fill from the top."""
    c = counts(_2=4, _5=7, _7=4, _9=4)
    assert select_by_count(c, 3).tolist() == [2, 5, 7]
    assert select_by_count(c, 3, pinned=[15]).tolist() == [2, 5, 15]
    assert select_by_count(c, 6).tolist() == [0, 1, 2, 5, 7, 9]


def test_narrow_corpus_fills_with_lowest_unused_ids() -> None:
    """Field-note 5: 3 distinct tokens, K = 5, five unique ids, the same on every build."""
    c = counts(_8=3, _10=1, _12=2)
    assert select_by_count(c, 5).tolist() == [0, 1, 8, 10, 12]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": 2, "pinned": [1, 2, 3]}, "3 pinned ids do not fit a draft_vocab_size of 2"),
        ({"size": 0}, "draft_vocab_size"),
        ({"size": V + 1}, "draft_vocab_size"),
        ({"size": True}, "draft_vocab_size"),
        ({"size": 3, "pinned": [V]}, "pinned ids must lie in"),
        ({"size": 3, "pinned": [3.7]}, "pinned ids must be whole numbers, not 3.7"),
        ({"size": 3, "pinned": ["4"]}, "pinned ids must be whole numbers"),
        ({"size": 3, "pinned": [True]}, "pinned ids must be whole numbers"),
        ({"size": 3, "tokenizer_size": 4.0}, "tokenizer_size must be a whole number"),
        ({"size": 1, "tokenizer_size": 1}, "padding rows"),
        ({"size": 11, "tokenizer_size": 10}, "produces only 10 ids"),
    ],
)
def test_selection_refuses(arguments: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        select_by_count(counts(_1=1), **arguments)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=40),
    st.data(),
)
def test_selection_properties(values: list[int], data: st.DataObject) -> None:
    """K distinct ascending ids, pins among them, nothing better left out, padding never kept."""
    c = np.array(values, dtype=np.int64)
    usable = data.draw(st.integers(1, len(c)))
    c[usable:] = 0
    size = data.draw(st.integers(1, usable))
    pins = data.draw(st.sets(st.integers(0, usable - 1), max_size=size))
    kept = select_by_count(c, size, pins, usable)
    assert len(kept) == size
    assert (np.diff(kept) > 0).all()
    assert pins <= set(kept.tolist())
    assert kept[-1] < usable
    free = set(kept.tolist()) - pins
    left = set(range(usable)) - set(kept.tolist())
    assert all((c[a], -a) > (c[b], -b) for a in free for b in left)
    t2d, d2t = buffers_from_kept(torch.from_numpy(kept), len(c))
    check_map(t2d, d2t, len(c), size)


def test_coverage_counts_tokens_not_ids() -> None:
    assert coverage(np.array([1, 3]), np.array([1, 5, 2, 2])) == 0.7
    with pytest.raises(UserError, match="no supervised token"):
        coverage(np.array([0]), np.zeros(4, dtype=np.int64))


def test_counting_takes_supervised_tokens_only() -> None:
    """Fault: prompts counted; a soft mask of 0.5 counted (supervised is > 0.5)."""
    sample = (np.array([3, 3, 5, 7]), np.array([0, 1, 0.5, 0.6], dtype=np.float32))
    assert count_supervised_tokens([sample, sample], 8).tolist() == [0, 0, 0, 2, 0, 0, 0, 2]
    with pytest.raises(UserError, match="vocab_size is 7"):
        count_supervised_tokens([sample], 7)


def malformed_maps() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    t2d, d2t = toy_map()
    absolute = torch.tensor(KEPT)
    negative = d2t.clone()
    negative[0] = -1
    beyond = d2t.clone()
    beyond[-1] = V - len(KEPT) + 1
    return {
        "absolute ids for offsets": (t2d, absolute),
        "an offset giving -1": (t2d, negative),
        "an offset giving V": (t2d, beyond),
        "int32": (t2d, d2t.int()),
        "t2d no bool": (t2d.int(), d2t),
        "t2d too long": (torch.cat([t2d, t2d]), d2t),
        "d2t too short": (t2d, d2t[:-1]),
        "another id kept": (t2d.roll(1), d2t),
        "empty": (torch.zeros_like(t2d), d2t),
    }


@pytest.mark.parametrize("kind", malformed_maps())
def test_malformed_map_is_refused_at_install_and_load(kind: str) -> None:
    """Field-note 3 and its kind. Fault: a map accepted on its shape alone."""
    t2d, d2t = malformed_maps()[kind]
    fresh = DSparkDraft(draft().config)
    with pytest.raises(UserError, match="vocabulary map"):
        fresh.install_vocab_mapping(t2d, d2t)
    assert not fresh.t2d.any()
    state = draft().state_dict() | {"t2d": t2d, "d2t": d2t}
    with pytest.raises(UserError, match="vocabulary map"):
        DSparkDraft(draft().config).double().load_state_dict(state)


def test_another_map_of_equal_size_is_refused() -> None:
    """Field-note 1: warm start with another corpus; the saved map wins."""
    other = buffers_from_kept(torch.tensor([1, 2, 5, 6, 7]), V)
    trained = draft()
    with pytest.raises(UserError, match=r"another vocabulary map is installed: 5 ids starting"):
        trained.install_vocab_mapping(*other)
    trained.install_vocab_mapping(*toy_map())  # the same map again is fine
    different = draft()
    different.vocabulary_changed()
    different.t2d.zero_()
    different.install_vocab_mapping(*other)
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        trained.load_state_dict(different.state_dict())
    assert trained.t2d.nonzero().squeeze(1).tolist() == list(KEPT)


def test_use_before_install_is_an_error() -> None:
    """Field-note 2: a pruned draft without a map must not become ids 0 … K−1."""
    with pytest.raises(UserError, match="no vocabulary map is installed"):
        DSparkDraft(draft().config).draft_vocab_index()


def test_map_for_an_unpruned_draft_is_refused() -> None:
    with pytest.raises(UserError, match="draft_vocab_size is 16"):
        draft(draft_vocab_size=None).install_vocab_mapping(*toy_map())


def test_buffers_exist_only_when_pruning() -> None:
    """Field-note 4: a full-vocabulary checkpoint keeps its exact key set."""
    assert {"t2d", "d2t"} <= set(draft().state_dict())
    assert not {"t2d", "d2t"} & set(draft(draft_vocab_size=None).state_dict())


def test_loaded_buffers_replace_what_was_derived() -> None:
    """Fault: index and head rows cached from before the load."""
    loaded = DSparkDraft(draft().config).double()
    loaded.load_state_dict(draft().state_dict())
    index = loaded.draft_vocab_index()
    assert (
        index.tolist()
        == [0, -100, -100, 1, 2, -100, -100, -100, -100, 3, -100, -100, 4] + [-100] * 3
    )
    head = torch.arange(V * 2.0).view(V, 2)
    assert loaded.draft_head(head)[:, 0].tolist() == [2.0 * i for i in KEPT]
    other = torch.arange(V * 2.0).view(V, 2) + 1
    assert loaded.draft_head(other)[0, 0] == 1  # another head, other rows


def test_map_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.safetensors"
    t2d, d2t = toy_map()
    save_map(path, t2d, d2t, corpus_fingerprint="c", tokenizer_fingerprint="t", coverage=0.75)
    back_t2d, back_d2t, metadata = load_map(path)
    assert torch.equal(back_t2d, t2d)
    assert torch.equal(back_d2t, d2t)
    assert metadata["coverage"] == "0.75"
    assert metadata["draft_vocab_size"] == "5"
    torch.save({"t2d": t2d, "d2t": d2t}, tmp_path / "field.pt")
    assert torch.equal(load_map(tmp_path / "field.pt")[1], d2t)
    with pytest.raises(UserError, match="vocabulary map"):
        save_map(
            tmp_path / "bad.safetensors",
            t2d.roll(1),
            d2t,
            corpus_fingerprint="",
            tokenizer_fingerprint="",
            coverage=0.0,
        )
    assert not list(tmp_path.glob("bad*"))


def test_unreadable_map_files_are_refused(tmp_path: Path) -> None:
    """Fault: a pickle executed, or a traceback instead of a sentence."""
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00")
    (tmp_path / "cut.pt").write_bytes(b"no archive")
    torch.save({"t2d": toy_map()[0]}, tmp_path / "half.pt")
    torch.save({"t2d": [True], "d2t": [0]}, tmp_path / "lists.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    torch.save({"t2d": torch.tensor(True), "d2t": torch.tensor(0)}, tmp_path / "scalars.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    names = [path.name for path in tmp_path.iterdir()] + ["absent.safetensors"]
    assert len(names) == 8
    for name in names:
        with pytest.raises(UserError, match="no vocabulary map could be read"):
            load_map(tmp_path / name)


def test_config_of_another_vocabulary_is_not_taken(tmp_path: Path) -> None:
    config: DraftConfig = draft().config
    wider = config.model_copy(update={"vocab_size": V + 4})
    with pytest.raises(UserError, match=r"t2d must be torch.bool of shape \[20\]"):
        DSparkDraft(wider).install_vocab_mapping(*toy_map())


def test_map_files_that_keep_nothing_or_contradict_themselves(tmp_path: Path) -> None:
    """Faults: K = 0 loaded as a map; metadata of another file beside the tensors."""
    from safetensors.torch import save_file

    none = {"t2d": torch.zeros(4, dtype=torch.bool), "d2t": torch.zeros(0, dtype=torch.int64)}
    save_file(none, tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="keeps no id"):
        load_map(tmp_path / "none.safetensors")
    t2d, d2t = toy_map()
    save_file({"t2d": t2d, "d2t": d2t}, tmp_path / "odd.safetensors", {"vocab_size": "99"})
    with pytest.raises(UserError, match="vocab_size 99, its tensors 16"):
        load_map(tmp_path / "odd.safetensors")
