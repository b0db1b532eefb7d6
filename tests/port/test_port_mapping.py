"""The vocabulary buffers' contract (contracts §1) on every way a map can arrive.

A toy family with and without buffers when unpruned stands for all: its head's row i holds the
target id that the row means, so that a wrong id shows as a number.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import KEPT, V, batch, draft, target, toy_map

from torch_port.blocks import make_blocks
from torch_port.config import ObjectiveConfig
from torch_port.errors import UserError
from torch_port.models.dspark import DSparkDraft
from torch_port.models.registry import ALGORITHMS
from torch_port.objective.evaluate import batch_denominators
from torch_port.vocabulary import mapping
from torch_port.vocabulary.broadcast import broadcast_vocab_mapping
from torch_port.vocabulary.mapping import DraftVocabMappingMixin, buffers_from_kept
from torch_port.vocabulary.selection import select_by_count

K = len(KEPT)
OTHER = (1, 2, 5, 6, 7)
ROWS = torch.arange(V, dtype=torch.float32).view(V, 1)  # row v of the target's head says v


class Toy(DraftVocabMappingMixin):
    """A draft that is its head alone."""

    def __init__(self, vocab_size: int = V, draft_vocab_size: int = K) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(draft_vocab_size, 1))
        self.register_vocab_buffers(vocab_size, draft_vocab_size)


class AlwaysBuffered(Toy):
    """As EAGLE3: buffers also when K = V."""

    keeps_vocab_buffers_when_unpruned: ClassVar[bool] = True


def a_map(kept: tuple[int, ...], vocab_size: int = V) -> tuple[Tensor, Tensor]:
    return buffers_from_kept(torch.tensor(kept), vocab_size)


def installed(kept: tuple[int, ...] = KEPT, family: type[Toy] = Toy) -> Toy:
    toy = family(V, len(kept))
    toy.install_vocab_mapping(*a_map(kept))
    with torch.no_grad():
        toy.head.copy_(toy.draft_head(ROWS))
    return toy


def decoded(toy: DraftVocabMappingMixin) -> list[int]:
    """What the draft emits for draft ids 0 … K−1, through every derived table, which must agree."""
    draft_ids = torch.arange(toy.draft_vocab_size)
    ids = toy.to_target_ids(draft_ids)
    assert toy.draft_vocab_index()[ids].tolist() == draft_ids.tolist()
    assert toy.draft_head(ROWS[: toy.vocab_size])[:, 0].tolist() == ids.tolist()
    assert toy.kept_target_ids().tolist() == ids.tolist()
    rest = sorted(set(range(toy.vocab_size)) - set(ids.tolist()))
    assert toy.pruned_target_ids().tolist() == rest
    return ids.tolist()


def refuses(toy: DraftVocabMappingMixin, words: str) -> None:
    """Every use raises, the same one again too."""
    for use in (
        toy.require_vocabulary,
        toy.kept_target_ids,
        lambda: toy.to_target_ids(torch.tensor([0])),
        toy.draft_vocab_index,
        toy.pruned_target_ids,
        lambda: toy.draft_head(ROWS),
        toy.exported_vocabulary,
    ):
        with pytest.raises(UserError, match=words):
            use()


def test_registration_conditional_and_unconditional() -> None:
    """Contracts §1. Faults: keys added to a full-vocabulary checkpoint; none in EAGLE3's."""
    assert set(Toy(V, V).state_dict()) == {"head"}
    assert set(Toy(V, K).state_dict()) == {"head", "t2d", "d2t"}
    assert set(AlwaysBuffered(V, V).state_dict()) == {"head", "t2d", "d2t"}
    identity = AlwaysBuffered(V, V)
    assert identity.t2d.all()
    assert not identity.d2t.any()
    assert decoded(identity) == list(range(V))
    assert decoded(Toy(V, V)) == list(range(V))
    assert identity.draft_head(ROWS) is ROWS  # no copy of the head
    assert identity.exported_vocabulary().keys() == {"t2d", "d2t"}
    assert Toy(V, V).exported_vocabulary() == {}
    refuses(Toy(V, K), "no vocabulary map is installed")
    refuses(AlwaysBuffered(V, K), "no vocabulary map is installed")


def test_every_family_uses_the_mixin() -> None:
    """Fault: a family with its own copy of the contract, or none."""
    for algorithm in ALGORITHMS.values():
        family = algorithm.draft_class()
        assert issubclass(family, DraftVocabMappingMixin)
        own = set(vars(family)) & set(vars(DraftVocabMappingMixin))
        assert own <= {"__module__", "__doc__", "__init__", "__annotations__",
                       "keeps_vocab_buffers_when_unpruned", "__firstlineno__",
                       "__static_attributes__", "__parameters__"}  # fmt: skip


@pytest.mark.parametrize("size", [0, -1, V + 1, True, 5.0])
def test_sizes_are_not_coerced(size: object) -> None:
    with pytest.raises(UserError, match="draft_vocab_size"):
        DraftVocabMappingMixin().register_vocab_buffers(V, size)  # type: ignore[arg-type]


def test_forward_before_install_is_an_error() -> None:
    """Field-note 2: a corpus of ids 10 … 15, K = 5, no map. Fault: ids 0 … 4 in their stead."""
    b = replace(batch(), input_ids=10 + batch().input_ids % 6)
    model = DSparkDraft(draft().config).double()
    c = model.config
    blocks = make_blocks(
        b.input_ids,
        b.loss_mask,
        b.anchor_positions,
        b.block_keep_mask,
        block_size=c.block_size,
        mask_token_id=c.mask_token_id,
        draft_index_V=torch.zeros(V, dtype=torch.int64),
    )
    inputs = (blocks, b.hidden_states, b.anchor_positions, b.block_keep_mask, target())
    with pytest.raises(UserError, match="no vocabulary map is installed"):
        model(*inputs)
    model.install_vocab_mapping(*toy_map())
    assert model(*inputs).shape == (2, 3, 4, 8)


def test_only_the_identity_goes_into_an_unpruned_draft() -> None:
    toy = AlwaysBuffered(V, V)
    toy.install_vocab_mapping(*a_map(tuple(range(V))))
    t2d, d2t = a_map(tuple(range(V)))
    t2d[3] = False
    with pytest.raises(UserError, match="vocabulary map"):
        toy.install_vocab_mapping(t2d, d2t)
    with pytest.raises(UserError, match="set draft_vocab_size below vocab_size"):
        Toy(V, V).install_vocab_mapping(*a_map(tuple(range(V))))


def test_installed_state_is_read_from_the_buffers() -> None:
    """Fault: a flag that install sets, which a load, a broadcast or zeroing does not."""
    toy = Toy()
    toy.load_state_dict(installed().state_dict())
    assert decoded(toy) == list(KEPT)
    toy.t2d.zero_()
    refuses(toy, "no vocabulary map is installed")
    toy.install_vocab_mapping(*a_map(OTHER))  # nothing is installed that it could contradict
    assert decoded(toy) == list(OTHER)


@pytest.mark.parametrize("assign", [False, True])
def test_other_map_is_refused_at_load_before_anything_is_taken(assign: bool) -> None:
    """Field-note 1. Fault: the refused checkpoint's weights are in already."""
    toy = installed()
    with pytest.raises(UserError, match=r"5 ids starting \[0, 3, 4.*5 ids starting \[1, 2, 5"):
        toy.load_state_dict(installed(OTHER).state_dict(), assign=assign)
    assert decoded(toy) == list(KEPT)
    assert toy.head[:, 0].tolist() == list(KEPT)
    toy.load_state_dict(installed().state_dict(), assign=assign)
    assert decoded(toy) == list(KEPT)


def test_checkpoints_that_say_something_else_about_the_vocabulary() -> None:
    """Faults: half a map; a map ignored by an unpruned draft (also with strict=False); none."""
    state = installed().state_dict()
    half = {name: x for name, x in state.items() if name != "d2t"}
    with pytest.raises(UserError, match="holds t2d but no d2t"):
        Toy().load_state_dict(half, strict=False)
    with pytest.raises(UserError, match=rf"one of {K} of {V} ids.*set draft_vocab_size to {K}"):
        Toy(V, V).load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "t2d", "d2t"'):
        Toy().load_state_dict({"head": state["head"]})
    with pytest.raises(UserError, match="vocabulary map"):
        AlwaysBuffered(V, V).load_state_dict(Toy(V, K).state_dict())
    never = Toy()
    never.load_state_dict(Toy().state_dict())  # saved before its map came
    refuses(never, "no vocabulary map is installed")
    empty = {"head": torch.zeros(V, 1), "t2d": torch.zeros(V, dtype=torch.bool),
             "d2t": torch.zeros(V, dtype=torch.int64)}  # fmt: skip
    with pytest.raises(UserError, match="vocabulary map"):  # the identity is no longer one
        AlwaysBuffered(V, V).load_state_dict(empty)


def test_derived_tables_follow_every_change() -> None:
    """Faults: tables of the map before; a version that install or load does not bump."""
    toy = Toy()
    version = toy.vocabulary_version
    toy.install_vocab_mapping(*a_map(KEPT))
    assert toy.vocabulary_version > version
    assert decoded(toy) == list(KEPT)
    toy.clear_vocab_buffers()
    version = toy.vocabulary_version
    toy.load_state_dict(installed(OTHER).state_dict())
    assert toy.vocabulary_version > version
    assert decoded(toy) == list(OTHER)
    twin = copy.deepcopy(toy)
    twin.clear_vocab_buffers()
    twin.install_vocab_mapping(*a_map(KEPT))
    assert decoded(twin) == list(KEPT)
    assert decoded(toy) == list(OTHER)


def test_copies_of_a_draft_copy_no_target_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: V·H more bytes for every copy, by way of the rows that the draft keeps at hand."""
    toy, shapes = installed(), []
    toy.draft_head(ROWS)
    original = Tensor.__deepcopy__

    def counted(tensor: Tensor, memo: dict[int, object]) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return original(tensor, memo)

    monkeypatch.setattr(Tensor, "__deepcopy__", counted)
    assert decoded(copy.deepcopy(toy)) == list(KEPT)
    assert shapes
    assert tuple(ROWS.shape) not in shapes


def test_buffers_are_read_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a host read, which is a device sync, at every step."""
    reads: list[int] = []
    original = mapping.check_map
    monkeypatch.setattr(mapping, "check_map", lambda *args: (reads.append(1), original(*args))[1])
    toy = Toy()
    toy.load_state_dict(installed().state_dict())
    reads.clear()
    for _ in range(3):
        decoded(toy)
    assert not reads
    toy.vocabulary_changed()
    decoded(toy)
    assert len(reads) == 1


def test_change_in_place_is_noticed_and_another_map_refused() -> None:
    """A sharded load writes into the buffers themselves, past every hook."""
    fresh, other = Toy(), a_map(OTHER)
    fresh.t2d.copy_(other[0])
    fresh.d2t.copy_(other[1])
    assert decoded(fresh) == list(OTHER)
    trained = installed()
    version = trained.vocabulary_version
    trained.t2d.copy_(other[0])
    trained.d2t.copy_(other[1])
    refuses(trained, "another vocabulary map is installed")
    assert trained.vocabulary_version > version
    for kept in (OTHER, KEPT):  # neither map may be put on top: the head's rows are in doubt
        with pytest.raises(UserError, match="another vocabulary map is installed"):
            trained.install_vocab_mapping(*a_map(kept))
    # The documented way of a sharded load: write into state_dict()'s own tensors, then load it.
    trained = installed()
    state = trained.state_dict()
    for name, value in installed(OTHER).state_dict().items():
        state[name].copy_(value)
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        trained.load_state_dict(state)


def test_change_that_torch_does_not_count_needs_the_call() -> None:
    """`vocabulary_changed` is what a collective's caller says. Fault: it does not read again."""
    toy, other = installed(), a_map(OTHER)
    toy.t2d.numpy()[:] = other[0].numpy()
    toy.d2t.numpy()[:] = other[1].numpy()
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        toy.vocabulary_changed()
    fresh = Toy()
    fresh.t2d.numpy()[:] = other[0].numpy()
    fresh.d2t.numpy()[:] = other[1].numpy()
    fresh.vocabulary_changed()
    assert decoded(fresh) == list(OTHER)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("family", [Toy, AlwaysBuffered])
def test_materialised_from_meta_is_not_installed(
    wrapped: bool, family: type[Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: uninitialised memory, here all true and an old map's, taken for an installed map."""
    stale = installed(OTHER)

    def dirty(tensor: Tensor, *, device: object = None, **_: object) -> Tensor:
        old = {torch.bool: stale.t2d, torch.int64: stale.d2t}.get(tensor.dtype)
        if old is not None and old.shape == tensor.shape:
            return old.clone()
        return torch.full(tensor.shape, 1, dtype=tensor.dtype)

    with torch.device("meta"):
        toy, full = family(), AlwaysBuffered(V, V)
    refuses(toy, "on the meta device")
    with pytest.raises(UserError, match="materialise it first"):
        toy.install_vocab_mapping(*a_map(KEPT))
    monkeypatch.setattr(torch, "empty_like", dirty)
    for module in (toy, full):
        (nn.Sequential(module) if wrapped else module).to_empty(device="cpu")
    refuses(toy, "no vocabulary map is installed")
    assert decoded(full) == list(range(V))
    toy.load_state_dict(installed().state_dict())
    assert decoded(toy) == list(KEPT)
    toy.to_empty(device="cpu")  # of an installed draft as well
    refuses(toy, "no vocabulary map is installed")


def test_moves_keep_the_map_and_drop_the_tables() -> None:
    """Fault: a `.to` that loses the map, or tables left on the device before."""
    toy = installed()
    before = toy.kept_target_ids()
    assert decoded(toy.double()) == list(KEPT)
    assert toy.kept_target_ids() is not before
    toy.to("meta")
    refuses(toy, "on the meta device")


class FromPretrainedStyle:
    """What from_pretrained does: buffers replaced by attribute, no method of the draft called."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __call__(self, toy: Toy) -> Toy:
        for name, tensor in self.tensors.items():
            setattr(toy, name, nn.Parameter(tensor) if name == "head" else tensor)
        return toy


def test_buffers_replaced_by_attribute() -> None:
    """Faults: tables of the replaced buffers; another map accepted; garbage decoded."""
    state = {name: x.detach().clone() for name, x in installed(OTHER).state_dict().items()}
    with torch.device("meta"):
        fresh = Toy()
    assert decoded(FromPretrainedStyle(**state)(fresh)) == list(OTHER)
    trained = installed()
    refuses(FromPretrainedStyle(**state)(trained), "another vocabulary map is installed")
    with torch.device("meta"):
        garbage = Toy()
    random = torch.Generator().manual_seed(0)
    FromPretrainedStyle(
        head=state["head"],
        t2d=torch.rand(V, generator=random) > 0.5,
        d2t=torch.randint(0, 2**40, (K,), generator=random),
    )(garbage)
    refuses(garbage, "vocabulary map: nonzero")


def test_real_from_pretrained(tmp_path: Path) -> None:
    """transformers' own loader. Faults: as above, through its code; a missing map decoded."""
    from safetensors.torch import load_file, save_file
    from transformers import PretrainedConfig, PreTrainedModel

    class HFToy(Toy, PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            PreTrainedModel.__init__(self, config)
            self.head = nn.Parameter(torch.zeros(K, 1))
            self.register_vocab_buffers(V, K)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            if module is self and not getattr(self.t2d, "_is_hf_initialized", False):
                self.clear_vocab_buffers()

    HFToy(PretrainedConfig()).save_pretrained(tmp_path)
    save_file(installed().state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    loaded = HFToy.from_pretrained(tmp_path)
    assert decoded(loaded) == list(KEPT)
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        loaded.install_vocab_mapping(*a_map(OTHER))
    state = load_file(tmp_path / "model.safetensors")
    save_file({"head": state["head"]}, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(HFToy.from_pretrained(tmp_path), "vocabulary map")


def test_export_holds_what_a_reader_needs() -> None:
    """Field-note 4: from exported tensors alone, by the sheet's formula, the same ids."""
    exported = draft().exported_vocabulary()
    i = torch.arange(K)
    assert (i + exported["d2t"]).tolist() == list(KEPT)
    assert exported["t2d"].nonzero().squeeze(1).tolist() == list(KEPT)


def test_labels_are_looked_up_in_draft_ids() -> None:
    """Field-note 10: label 9 is draft 3; label 7 leaves the cross entropy and stays in L1.

    Fault: labels left in target ids while the logits are in draft ids.
    """
    index = draft().draft_vocab_index()
    assert (index[9], index[7]) == (3, -100)
    b = batch([[1.0] * 12], anchors=[[2]], keep=[[True]])
    ids = b.input_ids.clone()
    ids[0, 2:7] = torch.tensor([3, 9, 7, 0, 4])
    den, ce_den = batch_denominators(draft(), replace(b, input_ids=ids), ObjectiveConfig()).tolist()
    assert (den, ce_den) == (4, 3)


def test_padding_ids_of_the_head_are_never_proposed() -> None:
    """Field-note 27: 20 ids, a head of 24 rows, padding logits +100. The map has none of them."""
    counts = np.ones(24, dtype=np.int64)
    counts[20:] = 0
    kept = select_by_count(counts, 18, pinned=[19], tokenizer_size=20)
    toy = Toy(24, 18)
    toy.install_vocab_mapping(*buffers_from_kept(torch.from_numpy(kept), 24))
    logits_V = torch.zeros(24)
    logits_V[20:] = 100.0
    logits_K = toy.draft_head(logits_V[:, None])[:, 0]
    assert logits_K.max() == 0
    assert toy.to_target_ids(torch.arange(18)).max() == 19


def test_broadcast_without_a_process_group() -> None:
    broadcast_vocab_mapping(installed())
    broadcast_vocab_mapping(Toy(V, V))
    with pytest.raises(UserError, match="no vocabulary map is installed"):
        broadcast_vocab_mapping(Toy())
