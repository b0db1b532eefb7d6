"""The vocabulary buffers of a draft: t2d and d2t, their one entrance and what follows from them.

Shape suffixes: V target ids, K draft ids, H hidden size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_port.config import check_draft_vocab_size
from torch_port.errors import UserError

PRUNED = -100  # what the index says of a target id that no draft id stands for
_NAMES = ("t2d", "d2t")


def buffers_from_kept(kept_K: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Make (t2d bool [V], d2t int64 [K]) of ascending kept target ids [K] (spec sheet §2).

    >>> t2d, d2t = buffers_from_kept(torch.tensor([0, 3, 4]), 6)
    >>> d2t.tolist()
    [0, 2, 2]
    """
    kept_K = kept_K.to("cpu", torch.int64)
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    t2d_V[kept_K] = True
    return t2d_V, kept_K - _arange(len(kept_K))


def _arange(size: int) -> Tensor:
    """Count on the host, whatever torch's default device is: maps are checked there."""
    return torch.arange(size, device="cpu")


def check_map(t2d_V: Tensor, d2t_K: Tensor, vocab_size: int, draft_vocab_size: int) -> None:
    """Refuse a map whose sizes, dtypes or invariant are off.

    The invariant: nonzero(t2d) equals arange(K) + d2t. From it follow K distinct ids in [0, V).
    Raises UserError, naming what was expected and what came. Source: spec sheet §2, contracts §1.
    """
    if draft_vocab_size < 1:
        raise UserError(
            "vocabulary map: it keeps no id at all; build it again with K of at least 1"
        )
    for name, tensor, dtype, size in (
        ("t2d", t2d_V, torch.bool, vocab_size),
        ("d2t", d2t_K, torch.int64, draft_vocab_size),
    ):
        if not isinstance(tensor, Tensor):
            raise UserError(
                f"vocabulary map: {name} must be a tensor, {dtype} of shape [{size}], not "
                f"{type(tensor).__name__}; make both with buffers_from_kept or load_map"
            )
        if tensor.dtype != dtype or tensor.shape != (size,):
            raise UserError(
                f"vocabulary map: {name} must be {dtype} of shape [{size}], not {tensor.dtype} of "
                f"shape {list(tensor.shape)}; is it the map of another draft_vocab_size or target?"
            )
    kept = t2d_V.cpu().nonzero().squeeze(1)
    if not torch.equal(kept, _arange(draft_vocab_size) + d2t_K.cpu()):
        raise UserError(
            "vocabulary map: nonzero(t2d) must equal arange(K) + d2t. d2t holds offsets, not "
            f"absolute ids: t2d keeps {len(kept)} ids, d2t names {len(d2t_K)}, and they differ; "
            "build the map again from the token counts"
        )


def describe_map(t2d_V: Tensor) -> str:
    """Name a selection shortly for an error: how many ids, the first ones, and a digest."""
    kept = t2d_V.cpu().nonzero().squeeze(1)
    digest = hashlib.sha256(kept.numpy().tobytes()).hexdigest()[:12]
    return f"{len(kept)} ids starting {kept[:5].tolist()}, sha256 {digest}"


@dataclass
class _Derived:
    """What follows from one state of the buffers, read from them once."""

    buffers: tuple[Tensor | None, Tensor | None]  # held, so that an id is not given out again
    stamp: tuple[object, ...]
    kept_K: Tensor
    index_V: Tensor | None = None
    pruned_P: Tensor | None = None
    head: tuple[Tensor, int | None, Tensor] | None = None  # U, its version, U_K

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Give a copy of the draft nothing: it reads its own buffers, and copies no target head."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as None, for the same reason: a draft sent to a process brings no target head."""
        return type(None), ()


class DraftVocabMappingMixin(nn.Module):
    """Owns t2d and d2t for a draft: registration, installation, checks and the load path.

    Buffers exist when the draft prunes, so an unpruned state dict keeps its exact key set; a family
    that sets `keeps_vocab_buffers_when_unpruned` has them always, holding the identity when K = V.

    Installed state is derived from the buffer (any t2d set), because buffers also arrive through
    `load_state_dict`, `from_pretrained`, a sharded load or a broadcast, which call no method of
    ours. They are read on the host once per change. A change in place is noticed at the next use by
    torch's own counter of in-place writes; collectives do not move that counter, so call
    `vocabulary_changed()` after one. Source: contracts §1.
    """

    keeps_vocab_buffers_when_unpruned: ClassVar[bool] = False

    vocab_size: int
    draft_vocab_size: int
    vocabulary_version: int = 0  # grows with every change: what else is derived can be keyed by it
    t2d: Tensor
    d2t: Tensor
    _derived: _Derived | None = None
    _known_V: Tensor | None = None  # t2d as last read, on the host: what a new map must equal

    def register_vocab_buffers(self, vocab_size: int, draft_vocab_size: int) -> None:
        """Register the buffers: not installed when K < V, the identity when K = V.

        Call once, from the draft's __init__. Raises UserError for a K that is no size of a draft
        vocabulary.
        """
        check_draft_vocab_size(draft_vocab_size, vocab_size)
        self.vocab_size, self.draft_vocab_size = vocab_size, draft_vocab_size
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)
        if self.prunes_vocabulary or self.keeps_vocab_buffers_when_unpruned:
            self.register_buffer("t2d", torch.empty(vocab_size, dtype=torch.bool))
            self.register_buffer("d2t", torch.empty(draft_vocab_size, dtype=torch.int64))
            self.clear_vocab_buffers()

    @property
    def prunes_vocabulary(self) -> bool:
        """True when K < V."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def has_vocab_buffers(self) -> bool:
        """True when this draft's state dict holds t2d and d2t."""
        return self._buffers.get("t2d") is not None

    def clear_vocab_buffers(self) -> None:
        """Return the buffers to "not installed" (to the identity when K = V).

        Uninitialised memory looks installed: whoever materialises a draft from the meta device
        calls this first. `to_empty` and `to` do. Nothing to do for a draft without buffers.
        """
        if not self.has_vocab_buffers:
            return
        self.t2d.fill_(not self.prunes_vocabulary)
        self.d2t.zero_()
        self._known_V = None
        self.vocabulary_changed()

    def install_vocab_mapping(self, t2d_V: Tensor, d2t_K: Tensor) -> None:
        """Install a map: the one entrance for every producer.

        Arguments: `t2d_V` bool [V]; `d2t_K` int64 [K].
        Raises UserError when the draft has no buffers, when the map is malformed, or when another
        map is installed already (its head rows would silently come to mean other tokens).
        """
        self.check_new_map(t2d_V, d2t_K)
        self.t2d.copy_(t2d_V)
        self.d2t.copy_(d2t_K)
        self.vocabulary_changed()

    def check_new_map(self, t2d_V: Tensor, d2t_K: Tensor) -> None:
        """Raise UserError where `install_vocab_mapping` would; nothing is changed."""
        if not self.has_vocab_buffers:
            raise UserError(
                f"a vocabulary map was given, but draft_vocab_size is {self.draft_vocab_size}, all "
                "of the target's; set draft_vocab_size below vocab_size or give no map"
            )
        if self.t2d.is_meta:
            raise UserError(
                "a vocabulary map was given to a draft on the meta device, which holds no values; "
                "materialise it first: draft.to_empty(device=…)"
            )
        check_map(t2d_V, d2t_K, self.vocab_size, self.draft_vocab_size)
        self._refuse_conflict(t2d_V)

    def vocabulary_changed(self) -> None:
        """Forget what was derived from the buffers and read them. Call after a broadcast.

        Raises UserError when they hold a malformed map, or another one than before.
        """
        self._derived = None
        self.vocabulary_version += 1
        if self.has_vocab_buffers and not self.t2d.is_meta and self.vocab_device.type != "meta":
            if bool(self.t2d.any()):
                self._vocabulary()
            else:
                self._known_V = None

    def _refuse_conflict(self, t2d_V: Tensor) -> None:
        """Compare a map with the installed one, and with the one that was read last.

        The two differ where a load wrote into the buffers themselves. All-False buffers are not
        installed, whatever was read before.
        """
        held_V = self.t2d.cpu()
        if not bool(held_V.any()):
            self._known_V = None
            return
        for installed_V in (held_V, self._known_V):
            if installed_V is not None and not torch.equal(installed_V, t2d_V.cpu()):
                raise UserError(
                    f"another vocabulary map is installed: {describe_map(installed_V)}; the new "
                    f"one has {describe_map(t2d_V)}. Every row of the trained head would come to "
                    "mean another token: keep the installed map, or start a new draft"
                )

    def _stamp(self) -> tuple[object, ...]:
        buffers = (self._buffers.get("t2d"), self._buffers.get("d2t"))
        return tuple((id(x), None if x is None else _writes(x)) for x in buffers)

    @torch.inference_mode(False)  # kept beyond the call
    def _vocabulary(self) -> _Derived:
        """Return what was derived from the buffers, read again when they changed."""
        stamp = self._stamp()
        if self._derived is None or self._derived.stamp != stamp:
            if self._derived is not None:  # changed, and nobody said so
                self._derived = None
                self.vocabulary_version += 1
            kept_K = self._read_kept_ids().to(self.vocab_device)
            buffers = (self._buffers.get("t2d"), self._buffers.get("d2t"))
            self._derived = _Derived(buffers, stamp, kept_K)
        return self._derived

    def _read_kept_ids(self) -> Tensor:
        """Return the kept ids, int64 [K], on the host, of buffers that hold a right map."""
        if not self.has_vocab_buffers:
            return _arange(self.vocab_size)
        if self.t2d.is_meta:
            raise UserError(
                "this draft is on the meta device and holds no vocabulary map; materialise it "
                "(draft.to_empty(device=…)), then install the map or load a checkpoint"
            )
        t2d_V, d2t_K = self.t2d.cpu(), self.d2t.cpu()
        if not bool(t2d_V.any()):
            raise UserError(
                f"this draft prunes to draft_vocab_size {self.draft_vocab_size}, but no "
                "vocabulary map is installed; call install_vocab_mapping or load a checkpoint"
            )
        check_map(t2d_V, d2t_K, self.vocab_size, self.draft_vocab_size)
        self._refuse_conflict(t2d_V)
        self._known_V = t2d_V.clone()
        return _arange(self.draft_vocab_size) + d2t_K

    def require_vocabulary(self) -> None:
        """Raise UserError before a map is installed. Every forward pass begins with it."""
        self._vocabulary()

    def kept_target_ids(self) -> Tensor:
        """Return the target id of each draft id, int64 [K] (read on the host once per change).

        Raises UserError before a map is installed.
        """
        return self._vocabulary().kept_K

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target ids of draft ids, int64, same shape: what decoding must emit.

        Raises UserError before a map is installed.
        """
        kept_K = self.kept_target_ids()
        return kept_K.index_select(0, draft_ids.flatten()).view(draft_ids.shape)

    def exported_vocabulary(self) -> dict[str, Tensor]:
        """Return t2d and d2t for a file that others read, on the host; empty without buffers.

        They are read anew: what torch did not count as a write must not leave unnoticed.
        Raises UserError before a map is installed: a server would take the first K ids for it.
        """
        self._read_kept_ids()
        if not self.has_vocab_buffers:
            return {}
        return {"t2d": self.t2d.cpu(), "d2t": self.d2t.cpu()}

    @torch.inference_mode(False)  # kept beyond the call
    def pruned_target_ids(self) -> Tensor:
        """Return the target ids that no draft id stands for, ascending, int64 [V − K]."""
        derived = self._vocabulary()
        if derived.pruned_P is None:
            index = self.draft_vocab_index().cpu()
            derived.pruned_P = (index == PRUNED).nonzero().squeeze(1).to(self.vocab_device)
        return derived.pruned_P

    @property
    def vocab_device(self) -> torch.device:
        """Where the derived tables live: with the draft's parameters, else with the buffers."""
        first = next(self.parameters(), None)
        return self.t2d.device if first is None else first.device

    @torch.inference_mode(False)  # kept beyond the call
    def draft_vocab_index(self) -> Tensor:
        """Return the draft id of each target id, int64 [V]; −100 where it was pruned."""
        derived = self._vocabulary()
        if derived.index_V is None:
            kept = derived.kept_K
            index = torch.full((self.vocab_size,), PRUNED, device=kept.device)
            derived.index_V = index.scatter(0, kept, torch.arange(len(kept), device=kept.device))
        return derived.index_V

    @torch.inference_mode(False)  # kept beyond the call
    def draft_head(self, lm_head_VH: Tensor) -> Tensor:
        """Return U_K [K, H], the rows of the frozen target head that the draft keeps.

        Sliced once per map and head; an unpruned draft gets the head itself.
        Raises UserError before a map is installed, and for a head that has not V rows.
        """
        derived = self._vocabulary()
        if len(lm_head_VH) != self.vocab_size:
            raise UserError(
                f"the target's head has {len(lm_head_VH)} rows, but this draft's vocab_size is "
                f"{self.vocab_size}; give the head of the target that the draft is for"
            )
        if not self.prunes_vocabulary:
            return lm_head_VH
        head, writes = derived.head, _writes(lm_head_VH)
        if head is None or head[0] is not lm_head_VH or head[1] != writes:
            head = (lm_head_VH, writes, lm_head_VH.index_select(0, derived.kept_K))
            derived.head = head
        return head[2]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # .to(device) moves the buffers; what was derived from them must follow. `to_empty`, here or
        # on a module around this one, leaves memory that nobody wrote: it must not look installed.
        before = [self._buffers.get(name) for name in _NAMES]
        result = super()._apply(fn, recurse)
        after = [self._buffers.get(name) for name in _NAMES]
        self._derived = None
        self.vocabulary_version += 1
        if not all(_same_content(old, new) for old, new in zip(before, after, strict=True)):
            self.clear_vocab_buffers()
        return result


def _writes(tensor: Tensor) -> int | None:
    """Torch's count of in-place writes; None where it keeps none."""
    return None if tensor.is_inference() else tensor._version


def _same_content(old: Tensor | None, new: Tensor | None) -> bool:
    """Tell whether a buffer still says what it said before a move."""
    if old is new or old is None or new is None or new.is_meta:
        return True
    if old.is_meta:
        return False
    return old.dtype != new.dtype or torch.equal(old.cpu(), new.cpu())  # a dtype is refused at use


def _before_load(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Refuse what a checkpoint says of the vocabulary, before any of it is taken."""
    assert isinstance(module, DraftVocabMappingMixin)
    t2d, d2t = (state_dict.get(prefix + name) for name in _NAMES)
    if t2d is None and d2t is None:
        return  # load_state_dict itself reports missing keys
    if t2d is None or d2t is None:
        there, absent = ("d2t", "t2d") if t2d is None else ("t2d", "d2t")
        raise UserError(
            f"vocabulary map: the checkpoint holds {there} but no {absent}; one without the other "
            "says nothing, save the draft again"
        )
    if not (isinstance(t2d, Tensor) and isinstance(d2t, Tensor)):
        raise UserError(
            f"vocabulary map: the checkpoint's t2d is {type(t2d).__name__} and its d2t "
            f"{type(d2t).__name__}; both must be tensors, save the draft again"
        )
    if not module.has_vocab_buffers:
        sizes = d2t.numel(), t2d.numel()
        raise UserError(
            f"vocabulary map: the checkpoint holds one of {sizes[0]} of {sizes[1]} ids, but this "
            f"draft has draft_vocab_size {module.draft_vocab_size}, all of the target's, and would "
            f"ignore it; set draft_vocab_size to {sizes[0]}, or load a full-vocabulary checkpoint"
        )
    if t2d.is_meta or d2t.is_meta or module.t2d.is_meta:
        return  # no values on one of the sides; what arrives is read after the load
    if not (bool(t2d.any()) or bool(d2t.any()) or bool(module.t2d.any())):
        return  # a checkpoint of a draft that never had a map; use raises later
    check_map(t2d, d2t, module.vocab_size, module.draft_vocab_size)
    module._refuse_conflict(t2d)


def _after_load(module: nn.Module, _: object) -> None:
    assert isinstance(module, DraftVocabMappingMixin)
    module.vocabulary_changed()
