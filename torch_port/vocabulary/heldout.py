"""What held-out counts must share with the training counts, and what they must not. No torch."""

from __future__ import annotations

from torch_port.errors import UserError
from torch_port.vocabulary.counts import TokenCounts


def check_heldout(counts: TokenCounts, heldout: TokenCounts) -> None:
    """Refuse held-out counts that say nothing about the training counts' map.

    Coverage compares only where one text becomes the same ids on both sides: tokenizer, V, chat
    template and maximum length agree. Features hold tokens already, so a side counted from
    features is compared by the first two. The texts themselves differ: no file or feature directory
    is on both sides, however it is called and with whatever else it was counted.

    Raises UserError naming the setting and both values.
    """
    if {*counts.contents} & {*heldout.contents}:
        shared = "the training corpus itself"
        if {*counts.contents} != {*heldout.contents}:
            common = len({*counts.contents} & {*heldout.contents})
            shared = f"{common} of the training corpus' files or directories"
        raise UserError(
            f"--heldout holds {shared} (equal contents), so its coverage says nothing about other "
            "text; give counts of conversations that were not counted for training"
        )
    _check_same(
        "--tokenizer",
        counts.tokenizer_fingerprint[:12],
        heldout.tokenizer_fingerprint[:12],
        "so its ids mean other tokens; count both with the target's tokenizer",
    )
    _check_same(
        "--vocab-size",
        str(len(counts.counts)),
        str(len(heldout.counts)),
        "so one head is not the target's; count both with the rows of the target's head",
    )
    if not (counts.chat_template and heldout.chat_template):
        return
    if counts.template_fingerprint != heldout.template_fingerprint:
        _check_same(
            "--chat-template",
            _template(counts),
            _template(heldout),
            "so the same text becomes other tokens; count both with the one of the training run",
        )
    _check_same(
        "--max-length",
        str(counts.max_length),
        str(heldout.max_length),
        "so other parts of conversations count; count both with the one of the training run",
    )


def _check_same(option: str, training: str, heldout: str, why: str) -> None:
    if training != heldout:
        raise UserError(
            f"--heldout was counted with {option} {heldout}, the training corpus with {training}, "
            f"{why}"
        )


def _template(counts: TokenCounts) -> str:
    return f"{counts.chat_template} ({counts.template_fingerprint[:12]})"
