"""A draft without a training state in an orbax directory: weights, vocabulary map, config.

All families; the weights keep their dtype, each its own. What other formats say of a draft beside
that (`extra`, a JSON document, and `carried`, arrays such as rows of the target's head) is carried
for whoever wrote it, and not read here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdraft import stored
from jaxdraft.backbone import Backbone
from jaxdraft.config import DSPARK, DraftConfig
from jaxdraft.draft import DSparkDraft
from jaxdraft.eagle3 import Eagle3Draft
from jaxdraft.eagle3_config import Eagle3Config
from jaxdraft.vocabulary import VocabularyMap, map_from_buffers

FORMAT = 1
_NO_SUCH = "no parameter of this draft"


class SavedDraft(NamedTuple):
    """A draft from a file: NumPy arrays in a parameter tree, its map (None: unpruned), its config.

    An EAGLE3 draft always has a map; it is the identity where K = V (sheet §13).
    """

    params: Any
    vocabulary: VocabularyMap | None
    config: DraftConfig | Eagle3Config


def read_config(hf_config: Mapping[str, Any]) -> DraftConfig | Eagle3Config:
    """Read a config.json of any family.

    Args:
        hf_config: the parsed JSON (contracts §4, format `hf`).

    Returns:
        The config.

    Raises:
        ValueError: unknown, missing, off or contradicting fields, each named.
        NotBuilt: a value that the schema allows and this specification does not cover.
    """
    eagle3 = "eagle_config" in hf_config
    return Eagle3Config.from_hf(hf_config) if eagle3 else DraftConfig.from_hf(hf_config)


def abstract_params(config: DraftConfig | Eagle3Config, dtype: DTypeLike) -> Any:
    """A draft's parameter tree as shapes, from its config alone.

    Args:
        config: what the draft is.
        dtype: of the parameters.

    Returns:
        A tree of `jax.ShapeDtypeStruct`.
    """
    H, K = config.hidden_size, config.draft_vocab_size
    states = jnp.zeros((1, 1, len(config.target_layer_ids) * H), dtype)
    if isinstance(config, Eagle3Config):
        model: Any = Eagle3Draft(config, dtype)
        inputs: tuple[Any, ...] = (states, jnp.zeros((1, 1, 1, H), dtype))
    else:
        γ = config.block_size
        anchors, keep = jnp.zeros((1, 1), int), jnp.ones((1, 1), bool)
        inputs = (states, jnp.zeros((1, 1, γ, H), dtype), anchors, keep)
        model = Backbone(config, dtype)
        if config.projector_type == DSPARK:
            model = DSparkDraft(config, dtype)
            inputs += (jnp.zeros((1, 1, γ), int), jnp.zeros((K, H), dtype))
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]


def save_draft(
    directory: Path,
    hf_config: Mapping[str, Any],
    params: Any,
    vocabulary: VocabularyMap | None,
    extra: Mapping[str, Any] | None = None,
    carried: Mapping[str, Any] | None = None,
) -> None:
    """Write a draft; it appears complete or not at all.

    Args:
        directory: path that does not exist yet.
        hf_config: its config.json, parsed.
        params: its parameter tree, of NumPy's or jax's arrays of floating numbers.
        vocabulary: its map; None exactly where its family keeps none.
        extra: a JSON document to carry.
        carried: arrays to carry, by name.

    Raises:
        ValueError: the directory exists; parameters are missing, unknown or of another shape than
            the config says (each named); the map is of other sizes.

    Source: contracts §4.
    """
    config = read_config(hf_config)
    check_params(params, config, "params")
    _check_map(vocabulary, config)
    tree = {"params": params}
    if vocabulary is not None:
        tree |= {
            "t2d": np.asarray(vocabulary.t2d),
            "d2t": np.asarray(vocabulary.d2t).astype(np.int64),
        }
    trees = {"draft": tree} | ({"carried": dict(carried)} if carried else {})
    record = {"format": FORMAT, "config": dict(hf_config)}
    stored.write(directory, trees, {"config": record, "extra": dict(extra or {})})


def load_draft(directory: Path) -> SavedDraft:
    """Read a draft.

    Args:
        directory: what `save_draft` wrote.

    Returns:
        Parameters, map and config; nothing is filled in.

    Raises:
        ValueError: no draft is there, it cannot be read, or it does not fit its own config; the
            message names every parameter that does not.

    Source: contracts §4.
    """
    if not stored.holds(directory, "config") or not stored.holds(directory, "draft"):
        raise ValueError(
            f"{directory}: expected a draft that `save_draft` wrote, found none; check the path"
        )
    record = stored.read_document(directory, "config")
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{directory}: format {record.get('format')!r}, this version reads {FORMAT}"
        )
    config = read_config(record["config"])
    tree = stored.read_tree(directory, "draft")
    params = tree.get("params", {})
    check_params(params, config, str(directory))
    vocabulary = map_from_buffers(tree["t2d"], tree["d2t"]) if "t2d" in tree else None
    _check_map(vocabulary, config)
    return SavedDraft(params, vocabulary, config)


def read_carried(directory: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Read what a draft's directory holds beside the draft.

    Args:
        directory: what `save_draft` wrote.

    Returns:
        The config.json as it was given, the carried document and the carried arrays.
    """
    carried = stored.read_tree(directory, "carried") if stored.holds(directory, "carried") else {}
    config = stored.read_document(directory, "config")["config"]
    return config, stored.read_document(directory, "extra"), carried


def check_params(params: Any, config: DraftConfig | Eagle3Config, where: str) -> None:
    """Refuse parameters that are not those of the draft that the config describes.

    Args:
        params: the tree.
        config: what the draft is.
        where: what the tree is from, for the message.

    Raises:
        ValueError: names each parameter (the first eight) that is missing, unknown, of another
            shape, or no floating number.

    Source: contracts §4 ("refuses … naming each"); field note 22.
    """
    expected = stored.leaves_by_path(abstract_params(config, jnp.float32))
    given = stored.leaves_by_path(params)
    problems = [f"{name}: missing" for name in expected if name not in given]
    for name, leaf in given.items():
        if name not in expected:
            problems.append(f"{name}: {_NO_SUCH}")
        elif leaf.shape != expected[name].shape:
            problems.append(
                f"{name}: shape {list(leaf.shape)}, the config says {list(expected[name].shape)}"
            )
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            problems.append(f"{name}: {leaf.dtype} holds no floating numbers")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ValueError(f"{where}: " + "; ".join(problems[:8]) + more)


def _check_map(vocabulary: VocabularyMap | None, config: DraftConfig | Eagle3Config) -> None:
    wanted = config.prunes or isinstance(config, Eagle3Config)
    if vocabulary is None and not wanted:
        return
    V, K = config.vocab_size, config.draft_vocab_size
    if vocabulary is None:
        raise ValueError(
            f"no vocabulary map, but the draft keeps {K} of {V} ids; a server would take the first "
            "ones: give its map"
        )
    if not wanted:
        raise ValueError(
            f"a vocabulary map beside an unpruned draft of V = {V}: leave it out (None), or give "
            "the config its draft_vocab_size"
        )
    sizes = (vocabulary.t2d.shape[0], vocabulary.d2t.shape[0])
    if sizes != (V, K):
        raise ValueError(
            f"the vocabulary map has V = {sizes[0]}, K = {sizes[1]} but the config says V = {V}, "
            f"K = {K}: use the map of this draft"
        )
