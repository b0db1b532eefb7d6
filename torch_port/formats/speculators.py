"""config.json of the `speculators` format (what vLLM serves), to and from a draft's config.

The backbone stands under `transformer_layer_config`, the target's name under
`speculators_config.verifier`. Captured layers count from the embedding there:
`aux_hidden_state_layer_ids` are i + 1. Written and read against speculators 0.9.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_port.config import FULL, SLIDING, DraftConfig
from torch_port.config_eagle3 import Eagle3Config
from torch_port.errors import UserError
from torch_port.formats.config_files import (
    drop_code,
    has_sliding_layers,
    layer_count,
    merge_rope,
    refuse_quantised,
    take_neutral,
)

Config = DraftConfig | Eagle3Config

VERSION = "0.9.0"
_TYPES = {"dspark": True, "dflash": False}  # and what sample_from_anchor is in each
_ARCHITECTURES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}
_OWN = (
    "block_size",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
# The package's own defaults, which a file may leave out.
_DSPARK_DEFAULTS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "block_size": 8,
}
_BACKBONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "initializer_range",
    "hidden_act",
    "attention_bias",
)
_PROPOSAL = ("default_proposal_method", "proposal_methods")
_TOP_NEUTRAL = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")


def read_speculators(
    raw: Mapping[str, Any], num_target_layers: int | None, where: str
) -> tuple[str, DraftConfig, dict[str, Any], dict[str, Any], list[str]]:
    """Read a speculators config.

    Arguments: the parsed config.json; the number of the target's layers, where it is known from the
    target (a file of ours holds it as `num_target_layers`); `where` names the file.
    Returns (algorithm, config, neutral fields, verifier, notes); the verifier has the target's
    `name_or_path` and `architectures`, and `proposal` where the file proposes otherwise than all
    slots of a block, greedily.
    Raises UserError for unknown or missing fields, another layout, an unknown number of layers, and
    for more speculative tokens than a block predicts.
    """
    values, notes = dict(raw), list[str]()
    try:
        refuse_quantised(values)
        drop_code(values, notes)
        kind = values.pop("speculators_model_type", None)
        if not isinstance(kind, str) or kind not in _TYPES:
            raise UserError(
                f"speculators_model_type {kind!r} is not read; {' and '.join(_TYPES)} are"
            )
        _check_layout(kind, values)
        verifier = _take_speculators_config(kind, values)
        backbone = _take_backbone(values, notes)
        _check_sliding(backbone, values)
        neutral = take_neutral(values) | take_neutral(backbone)
        neutral.pop("use_sliding_window", None)  # this format's way to say what layer_types says
        config = _config(kind, values, backbone, num_target_layers)
        return kind, config, neutral, _kept_proposal(verifier, config), notes
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def speculators_config(
    config: Config,
    neutral: Mapping[str, Any],
    verifier: Mapping[str, Any] | None,
    speculative_tokens: int | None = None,
) -> dict[str, Any]:
    """Write a config in the speculators schema.

    Arguments: `verifier` as `read_speculators` returns it (None: the target is not named);
    `speculative_tokens`, how many the server proposes at a time (default: what the verifier says,
    else all of a block's).
    Raises UserError for EAGLE3, whose speculators form is not built, and for more tokens than a
    block predicts.
    """
    if isinstance(config, Eagle3Config):
        raise UserError(
            "an EAGLE3 draft is not written as speculators: its conventions there (norms, rotary "
            "positions, layer ids) could not be checked; export it as hf, which servers read"
        )
    named = {"name_or_path": None, "architectures": []} | dict(verifier or {})
    proposal = named.pop("proposal", None)
    if proposal is None or speculative_tokens is not None:
        proposal = _proposal(config, speculative_tokens)
    values = config.to_hf()
    nested = values.pop("dflash_config")
    kind = config.projector_type
    top = {name: neutral[name] for name in _TOP_NEUTRAL if name in neutral}
    inner = {n: v for n, v in neutral.items() if n not in _TOP_NEUTRAL}  # the switch is set below
    backbone = {name: values[name] for name in _BACKBONE if name != "rope_theta"}
    backbone |= {
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        # transformers drops a window that this switch does not announce
        "use_sliding_window": SLIDING in config.layer_types,
    }
    heads = {name: nested[name] for name in _OWN if name in nested} if kind == "dspark" else {}
    content = top | {
        "architectures": [_ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            **proposal,
            "verifier": named,
        },
        "transformer_layer_config": dict(sorted((inner | backbone).items())),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "num_target_layers": config.num_target_layers,  # the schema has no place; extras are kept
        "sample_from_anchor": _TYPES[kind],
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
    }
    return dict(sorted((content | heads).items()))


def _proposal(config: DraftConfig, speculative_tokens: int | None = None) -> dict[str, Any]:
    """How a server is told to propose: greedily, all slots that a block predicts unless told."""
    tokens = config.predictions if speculative_tokens is None else speculative_tokens
    _check_tokens(tokens, config)
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {"default_proposal_method": "greedy", "proposal_methods": [greedy]}


def _check_tokens(tokens: object, config: DraftConfig) -> None:
    """Refuse more drafts than a block predicts: the slots beyond were never trained."""
    if type(tokens) is not int or not 1 <= tokens <= config.predictions:
        raise UserError(
            f"speculative_tokens: {tokens!r} were asked of a draft that was trained for "
            f"{config.predictions} (block_size {config.block_size}, {config.block_layout}); ask "
            f"for 1 to {config.predictions}"
        )


def _kept_proposal(verifier: dict[str, Any], config: DraftConfig) -> dict[str, Any]:
    """Check the file's proposal; keep it where it is not the one that would be written."""
    proposal = verifier.pop("proposal")
    methods = proposal.get("proposal_methods", [])
    if not isinstance(methods, list) or not all(isinstance(way, Mapping) for way in methods):
        raise UserError(f"proposal_methods must be a list of objects, not {methods!r}")
    for way in methods:
        if way.get("proposal_type") != "greedy":
            raise UserError(f"proposal_type {way.get('proposal_type')!r} is not known; 'greedy' is")
        _check_tokens(way.get("speculative_tokens"), config)
    if proposal and proposal != _proposal(config):
        verifier["proposal"] = proposal
    return verifier


def _check_layout(kind: str, values: dict[str, Any]) -> None:
    wanted = _TYPES[kind]
    given = values.pop("sample_from_anchor", wanted)
    if given is not wanted:
        layout = "anchor-first" if given else "bonus-anchor"
        raise UserError(
            f"sample_from_anchor is {given!r}: a {kind} draft in the {layout} layout, whose slots "
            f"predict other tokens than those of ours; only {wanted!r} is read"
        )


def _take_speculators_config(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Take out speculators_config and the version; return the verifier, the proposal in it."""
    values.pop("speculators_version", None)
    values.pop("architectures", None)  # the class name, which differs between versions
    told = values.pop("speculators_config", None)
    if not isinstance(told, Mapping) or told.get("algorithm") != kind:
        raise UserError(f"speculators_config must be an object with algorithm {kind!r}")
    unknown = set(told) - {"algorithm", "verifier", *_PROPOSAL}
    if unknown:
        raise UserError(f"speculators_config has unknown fields: {', '.join(sorted(unknown))}")
    verifier = told.get("verifier")
    if not isinstance(verifier, Mapping) or set(verifier) - {"name_or_path", "architectures"}:
        raise UserError(
            f"speculators_config.verifier {verifier!r}: expected name_or_path and architectures"
        )
    return dict(verifier) | {"proposal": {name: told[name] for name in _PROPOSAL if name in told}}


def _take_backbone(values: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    backbone = values.pop("transformer_layer_config", None)
    if not isinstance(backbone, Mapping):
        raise UserError("transformer_layer_config is missing, or no object")
    backbone = dict(backbone)
    refuse_quantised(backbone)
    spelled: list[str] = []
    merge_rope(backbone, spelled)  # under rope_parameters is this format's own spelling: no note
    for place in (values, backbone):
        if place.pop("tie_word_embeddings", False) is not False:
            raise UserError("tie_word_embeddings is true: the draft's head would be its embedding")
    return backbone


def _check_sliding(backbone: Mapping[str, Any], values: dict[str, Any]) -> None:
    """A slot of a sliding layer sees its own block's earlier slots alone (spec sheet §4)."""
    non_causal = values.pop("sliding_window_non_causal", False)
    if has_sliding_layers(backbone) and non_causal is not False:
        raise UserError(
            "sliding_window_non_causal is true: sliding layers whose slots see later slots of "
            "their block are not built"
        )


def _config(
    kind: str, values: dict[str, Any], backbone: dict[str, Any], num_target_layers: int | None
) -> DraftConfig:
    layers = values.pop("num_target_layers", num_target_layers)
    if num_target_layers is not None and layers != num_target_layers:
        raise UserError(
            f"num_target_layers is {layers!r}, but the target has {num_target_layers}; is it "
            "another target?"
        )
    if layers is None:
        raise UserError(
            "nothing says how many layers the target has; give the target (--target DIR)"
        )
    hidden = values.pop("target_hidden_size", None)
    if hidden not in (None, backbone.get("hidden_size")):
        raise UserError(
            f"target_hidden_size is {hidden}, but hidden_size {backbone.get('hidden_size')}: "
            "drafts of another width than their target's are not built"
        )
    ids = values.pop("aux_hidden_state_layer_ids", None)
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        raise UserError(f"aux_hidden_state_layer_ids must be a list of layers, not {ids!r}")
    if 0 in ids:
        raise UserError("aux_hidden_state_layer_ids has 0, the embedding: no layer's output")
    if kind == "dspark":
        values = _DSPARK_DEFAULTS | values
    for name in ("mask_token_id", "draft_vocab_size"):
        if values.get(name) is None:
            raise UserError(f"{name} is missing; set it in config.json")
    nested = {
        name: values.pop(name) for name in _OWN if name in values and name != "block_size"
    } | {"projector_type": kind, "target_layer_ids": [layer - 1 for layer in ids]}
    flat = backbone | values | {"num_target_layers": layers, "dflash_config": nested}
    flat.setdefault("layer_types", None)
    if flat["layer_types"] is None and not flat.get("sliding_window"):
        flat["layer_types"] = [FULL] * (layer_count(flat) or 0)
    return DraftConfig.from_hf(flat)
