"""The demo's tokenizer: byte-level BPE with ChatML tokens, trained on the training corpus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_port.data.conversations import TURN_END, TURN_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK, PAD)


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens."""

    end_of_text: int
    turn_start: int
    turn_end: int
    mask: int
    pad: int

    def all(self) -> tuple[int, ...]:
        """The five ids: those a vocabulary map pins."""
        return (self.end_of_text, self.turn_start, self.turn_end, self.mask, self.pad)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE: special tokens first, then all 256 bytes, then merges.

    The same texts in the same order give the same tokenizer.

    Args:
        texts: the training corpus.
        vocab_size: number of ids at most, special tokens and bytes included.

    Returns:
        The tokenizer. It has fewer ids than `vocab_size` when the texts offer too few merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        # Without the whole alphabet a byte unseen in training could not be encoded at all.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Ids of the special tokens in a tokenizer that `train_tokenizer` made.

    Args:
        tokenizer: the trained tokenizer.

    Returns:
        The five ids.
    """
    numbers = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    ids = [number for number in numbers if number is not None]
    assert len(ids) == len(SPECIAL_TOKENS)
    return SpecialIds(*ids)
