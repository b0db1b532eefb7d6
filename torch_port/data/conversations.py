"""Conversations in the field's JSONL, and their token ids with an exact loss mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from torch_port.anchors import is_trainable
from torch_port.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
# How a turn is rendered, in parts that are encoded apart; a corpus fingerprint covers the whole.
_HEADER, _AFTER = "{role}\n", "\n"
CHAT_TEMPLATE = TURN_START + _HEADER + "{content}" + TURN_END + _AFTER

_FORMAT = '{"id": "…", "conversations": [{"role": "user", "content": "…"}, …]}'
_REMEDY = f"Write each line as {_FORMAT} with the roles system, user and assistant."


# Other names of a turn's keys and roles, as corpora have them.
_KEYS = {"from": "role", "value": "content"}
_ROLES = {"human": "user", "gpt": "assistant"}
_THINKING = ("reasoning_content", "reasoning", "thinking")  # keys of a turn, beside its content


class DataError(UserError):
    """Training data that cannot be read, with its file and line."""


class Turn(BaseModel):
    """One message of a conversation.

    Read as well: the keys `from` and `value`, the roles `human` and `gpt`, content in text parts.
    Thinking, as a part or as a key of its own, becomes content: `<think>…</think>` before it.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        turn = {_KEYS.get(key, key): value for key, value in given.items()}
        role, content = turn.get("role"), turn.get("content")
        turn["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
        if "role" not in given and "from" not in given:
            del turn["role"]
        if isinstance(content, list):
            content = _joined(content)
        thinking = next((turn[key] for key in _THINKING if turn.get(key)), None)
        if isinstance(thinking, str) and isinstance(content, str):
            content = _thought(thinking) + content
        return turn | {"content": content} if "content" in turn else turn


class Conversation(BaseModel):
    """One line of the field's JSONL; keys that training does not read are ignored.

    `messages` is read as `conversations`.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    id: str
    conversations: list[Turn] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            return given
        line = dict(given)
        if "messages" in line:
            if "conversations" in line:
                raise ValueError("holds conversations and messages, and only one can be meant")
            line["conversations"] = line.pop("messages")
        if type(line.get("id")) is int:
            line["id"] = str(line["id"])
        if line.get("id") is None and info.context:
            line["id"] = info.context["id"]
        return line


def _joined(parts: list[Any]) -> Any:
    """The text of content in parts, or the parts themselves where one is no text."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "thinking") else None
        if not isinstance(text, str):
            return parts
        texts.append(_thought(text) if kind == "thinking" else text)
    return "".join(texts)


def _thought(text: str) -> str:
    return f"<think>\n{text.strip()}\n</think>\n\n"


@dataclass(frozen=True)
class Sample:
    """Token ids of one conversation: `input_ids` int64 [S], `loss_mask` float32 [S] of 0 and 1.

    `truncated` says that the conversation went on.
    """

    id: str
    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    truncated: bool = False


@dataclass(frozen=True)
class SampleStats:
    """Encoded samples of one side of the split.

    `kept` have an anchor candidate, `untrainable` were dropped for having none, `truncated` of
    the kept ones were cut at `max_length`.
    """

    kept: int
    untrainable: int
    truncated: int


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Stream the conversations of a JSONL file; blank lines are ignored.

    Args:
        path: a UTF-8 file with one conversation per line.

    Yields:
        The conversations in the file's order.

    Raises:
        DataError: the file cannot be read, or a line is not JSON, lacks a key, has an unknown
            role, content that is no string, or no turns. Names file, line, finding and remedy.

    Source: issue 2, item 7 and "Bad input".
    """
    path = Path(path)
    try:
        with open(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield parse_conversation(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(
            f"{path}: expected a readable JSONL file, found: {error.strerror}. "
            "Check the path and its permissions."
        ) from None


def parse_conversation(line: bytes, where: str, default_id: str | None = None) -> Conversation:
    """Parse one line of JSONL.

    Args:
        line: JSON text in UTF-8.
        where: the line's place, for the error.
        default_id: the id of a line that gives none; without it such a line is an error.

    Returns:
        The conversation.

    Raises:
        DataError: as `read_conversations`, which says what can be wrong.
    """
    try:
        context = None if default_id is None else {"id": default_id}
        return Conversation.model_validate_json(line, context=context)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        text = line.decode("utf-8", errors="replace").strip()
        raise DataError(f"{where}: expected JSON, found {_short(text)}: {first['msg']}. {_REMEDY}")
    key = ".".join(map(str, first["loc"])) or "the line"
    found = "nothing" if first["type"] == "missing" else _short(first["input"])
    raise DataError(f"{where}: {key}: {first['msg']}, found {found}. {_REMEDY}")


def encode_conversation(
    tokenizer: Tokenizer, conversation: Conversation, max_length: int
) -> Sample:
    r"""Token ids of a conversation rendered as ChatML, with loss on the assistant's answers.

    A turn is `<|im_start|>role\ncontent<|im_end|>\n`. Supervised are an assistant's content and
    its `<|im_end|>`. Header, content and ending are encoded apart from each other, so that no
    token crosses the mask's border. Text in the content that looks like a special token is
    encoded as plain text: only the rendering puts special tokens.

    Args:
        tokenizer: has `<|im_start|>` and `<|im_end|>` as special tokens.
        conversation: the turns.
        max_length: positions to keep at most; the rest is cut off at the end.

    Returns:
        Ids and mask, both of length S ≤ `max_length`.

    Raises:
        DataError: `max_length` is below 2, or the tokenizer lacks the two special tokens.
    """
    if max_length < 2:
        raise DataError(
            f"max_length: expected at least 2 (an anchor and its label), found {max_length}. "
            "Raise max_length."
        )
    start, end = _special_id(tokenizer, TURN_START), _special_id(tokenizer, TURN_END)
    ids: list[int] = []
    mask: list[bool] = []
    for turn in conversation.conversations:
        header = [start, *_encode_text(tokenizer, _HEADER.format(role=turn.role))]
        answer = [*_encode_text(tokenizer, turn.content), end]
        newline = _encode_text(tokenizer, _AFTER)
        ids += header + answer + newline
        mask += [False] * len(header)
        mask += [turn.role == "assistant"] * len(answer)
        mask += [False] * len(newline)
    return Sample(
        id=conversation.id,
        input_ids=np.array(ids[:max_length], dtype=np.int64),
        loss_mask=np.array(mask[:max_length], dtype=np.float32),
        truncated=len(ids) > max_length,
    )


def encode_file(
    tokenizer: Tokenizer, path: str | Path, max_length: int
) -> tuple[list[Sample], SampleStats]:
    """Encode a JSONL file's conversations and drop those without an anchor candidate.

    Args:
        tokenizer, max_length: as for `encode_conversation`.
        path: as for `read_conversations`.

    Returns:
        The trainable samples in the file's order, and how many were kept, dropped and cut.

    Raises:
        DataError: as the two functions that it joins.
    """
    samples: list[Sample] = []
    untrainable = truncated = 0
    for conversation in read_conversations(path):
        sample = encode_conversation(tokenizer, conversation, max_length)
        if is_trainable(sample.loss_mask):
            samples.append(sample)
            truncated += sample.truncated
        else:
            untrainable += 1
    return samples, SampleStats(len(samples), untrainable, truncated)


def _short(value: object, limit: int = 60) -> str:
    """A value's repr, cut where it would fill the terminal."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _special_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise DataError(
            f"tokenizer: expected the special token {token}, found none. "
            "Use a tokenizer with ChatML tokens, or train one with `train_tokenizer`."
        )
    return int(number)


def _encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of plain text, in which special tokens have no meaning."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    finally:
        tokenizer.encode_special_tokens = before
    return ids
