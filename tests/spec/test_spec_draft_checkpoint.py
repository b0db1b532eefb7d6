"""Drafts without a training state in orbax: all families, any dtype, nothing filled in."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_eagle3 import HF as EAGLE3
from spec_toys import HF, hf, params, toy_map

from jaxdraft import DraftConfig, VocabularyMap, identity_map
from jaxdraft.draft_checkpoint import (
    abstract_params,
    load_draft,
    read_carried,
    read_config,
    save_draft,
)

DFLASH = {"projector_type": "dflash", "target_layer_ids": [0, 2], "mask_token_id": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "dspark": hf(),
    "dspark, unpruned": hf(draft_vocab_size=None),
    "dspark, gated": hf(markov_head_type="gated"),
    "dflash": HF | {"architectures": ["DFlashDraftModel"], "dflash_config": DFLASH},
    "eagle3": EAGLE3,
    "eagle3, unpruned": EAGLE3 | {"draft_vocab_size": None},
}


def drawn(hf_config: dict[str, Any], dtype: Any) -> Any:
    rng = np.random.default_rng(4)
    shapes = abstract_params(read_config(hf_config), jnp.float32)
    return jax.tree.map(lambda s: np.asarray(rng.normal(size=s.shape)).astype(dtype), shapes)


def map_of(hf_config: dict[str, Any]) -> VocabularyMap | None:
    config = read_config(hf_config)
    if config.prunes:
        return toy_map()
    return None if isinstance(config, DraftConfig) else identity_map(config.vocab_size)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_comes_back(family: str, dtype: Any, tmp_path: Path) -> None:
    """Faults: a family's parameters that are not held; a dtype widened or cut; the map or config of
    another draft; carried things dropped.
    """
    config = FAMILIES[family]
    tree, vocabulary = drawn(config, dtype), map_of(config)
    carried = {"lm_head": np.arange(6, dtype=np.float32)}
    save_draft(tmp_path / "d", config, tree, vocabulary, {"note": "π"}, carried)
    params, found, read = load_draft(tmp_path / "d")
    assert read == read_config(config)
    expected = jax.tree_util.tree_leaves_with_path(tree)
    leaves = dict(jax.tree_util.tree_leaves_with_path(params))
    assert len(leaves) == len(expected)
    for path, leaf in expected:
        assert (leaves[path].dtype, leaves[path].shape) == (leaf.dtype, leaf.shape), path
        assert leaves[path].tobytes() == leaf.tobytes(), path
    assert (found is None) == (vocabulary is None)
    if found is not None and vocabulary is not None:
        assert np.array_equal(found.t2d, vocabulary.t2d)
        assert np.array_equal(found.d2t, vocabulary.d2t)
    told, extra, arrays = read_carried(tmp_path / "d")
    assert (told, extra) == (config, {"note": "π"})
    assert arrays["lm_head"].tolist() == [0, 1, 2, 3, 4, 5]


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """Field note 22 and its kind.

    Faults: a parameter filled in, dropped or reshaped; a pruned draft without its map; a map beside
    an unpruned one; a file overwritten.
    """
    place, tree = tmp_path / "d", params(read_config(hf()))
    short = {name: leaf for name, leaf in tree.items() if name not in ("norm", "fc")}
    cases = [
        (hf(), short, toy_map(), "params: fc/kernel: missing; norm/scale: missing"),
        (hf(), tree | {"more": {"bias": np.zeros(1)}}, toy_map(), "more/bias: no parameter of"),
        (hf(), tree | {"norm": {"scale": np.zeros(7)}}, toy_map(), r"norm/scale: shape \[7\], the"),
        (hf(), tree | {"norm": {"scale": np.zeros(8, int)}}, toy_map(), "int64 holds no floating"),
        (hf(), tree, None, "no vocabulary map, but the draft keeps 5 of 16 ids"),
        (hf(), tree, identity_map(16), "has V = 16, K = 16 but the config says V = 16, K = 5"),
    ]
    for config, given, vocabulary, words in cases:
        with pytest.raises(ValueError, match=words):
            save_draft(place, config, given, vocabulary)
        assert not place.exists()
    full = hf(draft_vocab_size=None)
    with pytest.raises(ValueError, match="map beside an unpruned draft of V = 16"):
        save_draft(place, full, drawn(full, np.float32), identity_map(16))
    with pytest.raises(ValueError, match="expected a draft"):
        load_draft(place)
    save_draft(place, hf(), tree, toy_map())
    with pytest.raises(ValueError, match="never overwritten"):
        save_draft(place, hf(), tree, toy_map())


def test_an_altered_document_is_refused(tmp_path: Path) -> None:
    """Fault: a config of other numbers read beside the weights. Its JSON text is edited."""
    save_draft(tmp_path / "d", hf(), params(read_config(hf())), toy_map())
    file = tmp_path / "d" / "config" / "metadata"
    file.write_text(file.read_text().replace("10000.0", "20000.0"))
    with pytest.raises(ValueError, match="config is not what was written; copy the checkpoint"):
        load_draft(tmp_path / "d")
