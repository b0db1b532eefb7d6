"""How conversations become text: ChatML as the port trains it, or a Jinja template. No torch.

A Jinja template is rendered by transformers (in its sandbox). Which part of the text is an
assistant's answer is not in it, so it is found by rendering the conversation turn by turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torch_port.data.conversations import (
    CHAT_TEMPLATE,
    Conversation,
    DataError,
    Sample,
    encode_conversation,
)
from torch_port.data.tokenizer import load_tokenizer
from torch_port.errors import UserError

# Stands in for an answer: characters of no text, and nothing that a template would strip.
_MARK = "\ue000\ue001\ue000"
Encode = Callable[[Conversation, int], Sample]
_REMEDY = (
    "give chatml, tokenizer (the template beside the target's tokenizer.json) or a Jinja file's "
    "path; or capture features, and count those"
)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template: its `name` to people, its `text`, and `jinja` or the built-in rendering.

    `variables` are the tokenizer's special tokens that a Jinja template can name, as JSON.
    """

    name: str
    text: str
    jinja: bool = False
    variables: str = ""

    @property
    def covered(self) -> str:
        """All that decides the rendering: what a corpus fingerprint covers."""
        return f"{self.text}\0{self.variables}" if self.jinja else self.text

    @property
    def fingerprint(self) -> str:
        """The sha256 of what decides the rendering."""
        return hashlib.sha256(self.covered.encode()).hexdigest()


CHATML = ChatTemplate("chatml", CHAT_TEMPLATE)


def resolve_template(value: str, tokenizer_json: Path) -> ChatTemplate:
    """Return the template that --chat-template names.

    Arguments: `value`: `chatml`, `tokenizer`, or the path of a Jinja file; `tokenizer_json`, the
    target's, with tokenizer_config.json and chat_template.jinja beside it.
    Raises UserError for another name, an unreadable file, and a tokenizer without a template.
    """
    if value == CHATML.name:
        return CHATML
    if value == "tokenizer":
        loaded = _transformers(tokenizer_json)
        text = _own_template(loaded, tokenizer_json)
        return ChatTemplate(value, text, jinja=True, variables=_variables(loaded))
    path = Path(value)
    if not path.is_file():
        raise UserError(
            f"--chat-template is {value!r}, which is no template of ours and no file; {_REMEDY}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UserError(f"--chat-template {value} cannot be read ({why}); {_REMEDY}") from None
    variables = _variables(_transformers(tokenizer_json))
    return ChatTemplate(path.name, text, jinja=True, variables=variables)


def encoder(template: ChatTemplate, tokenizer_json: Path) -> Encode:
    """Return the function from (conversation, maximum length) to ids and loss mask."""
    if template.jinja:
        return _JinjaEncoder(template, tokenizer_json)
    tokenizer = load_tokenizer(tokenizer_json)
    return lambda conversation, length: encode_conversation(tokenizer, conversation, length)


class _JinjaEncoder:
    """Renders a conversation, tokenizes the whole text, and masks the assistant's turns.

    A turn begins where the generation prompt of the turns before it ends, and ends where the
    rendering up to it ends; where later turns change it, as `_span_within` says. After its last
    special token (the model stops there) white space does not count. A token counts when its first
    character lies in the turn.
    """

    def __init__(self, template: ChatTemplate, tokenizer_json: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self._template = template
        self._tokenizer = load_tokenizer(tokenizer_json)
        self._renderer = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer)
        # Those of the fingerprint, not what lies beside the tokenizer by now.
        self._variables = json.loads(template.variables)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}

    def __call__(self, conversation: Conversation, max_length: int) -> Sample:
        messages = [turn.model_dump() for turn in conversation.conversations]
        text = self._render(messages, False)
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoded.offsets], dtype=np.int64)
        mask = np.zeros(len(starts), dtype=np.float32)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                begin, end = self._span(messages, turn, text)
                inside = np.nonzero((starts >= begin) & (starts < end))[0]
                mask[self._until_stop(inside, encoded, text[:end])] = 1
        return Sample(
            id=conversation.id,
            input_ids=np.array(encoded.ids[:max_length], dtype=np.int64),
            loss_mask=mask[:max_length],
            truncated=len(encoded.ids) > max_length,
        )

    def _span(self, messages: list[dict[str, str]], turn: int, text: str) -> tuple[int, int]:
        """Where an assistant's turn begins and ends in the text."""
        after = self._render(messages[: turn + 1], False)
        if turn:
            before = self._render(messages[:turn], True)
        else:  # transformers renders no empty conversation: look for the generation prompt
            prompt = self._render(messages[:1], True).removeprefix(after)
            found = after.find(prompt) if prompt else -1
            before = after[: found + len(prompt)] if found >= 0 else ""
        if before and after.startswith(before) and text.startswith(after):
            return len(before), len(after)
        found_within = self._span_within(messages, turn, text, before, after) if turn else None
        if found_within is None:
            raise DataError(
                f"--chat-template {self._template.name}: the conversation up to turn {turn + 1} "
                "(assistant) is rendered otherwise than within the whole, so the turn's tokens "
                "cannot be told apart; use a template whose earlier turns do not change with later "
                "ones, or capture features with their loss masks, and count those"
            )
        return found_within

    def _span_within(
        self, messages: list[dict[str, str]], turn: int, text: str, before: str, after: str
    ) -> tuple[int, int] | None:
        """The span of a turn whose answer is rendered otherwise once more turns follow.

        Templates of reasoning models put an empty or real thinking part into the last turn alone.
        The answer is found by rendering the conversation with another one in its place: what
        differs is the answer. Before it belongs what the generation prompt does not end with
        anyway, behind it what ends the turn. None when that does not hold.
        """
        asked = self._render(messages[:turn], False)
        other = [*messages]
        other[turn] = {**messages[turn], "content": _MARK}
        begin, end = _difference(text, self._render(other, False))
        _, answer_end = _difference(after, self._render(other[: turn + 1], False))
        ending = after[answer_end:]
        if not (
            text.startswith(asked)
            and before.startswith(asked)
            and begin >= len(asked)
            and text[begin:end] in messages[turn]["content"]
            and text.startswith(ending, end)
        ):
            return None
        return min(begin, _shared(before, text)), end + len(ending)

    def _until_stop(self, inside: Any, encoded: Any, until: str) -> Any:
        """Leave out the white space after the turn's last special token."""
        for place in range(len(inside) - 1, -1, -1):
            token = inside[place]
            if encoded.ids[token] in self._special:
                blank = not until[encoded.offsets[token][1] :].strip()
                return inside[: place + 1] if blank else inside
        return inside

    def _render(self, messages: list[dict[str, str]], prompt: bool) -> str:
        import jinja2

        try:
            text: str = self._renderer.apply_chat_template(
                messages,
                chat_template=self._template.text,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            first_line = str(error).split("\n", 1)[0]
            raise DataError(
                f"--chat-template {self._template.name} cannot render the conversation "
                f"({first_line}); correct the template, or leave such conversations out"
            ) from None
        return text


def _difference(text: str, other: str) -> tuple[int, int]:
    """Where the part of `text` that is not in `other` begins and ends."""
    begin = _shared(text, other)
    return begin, len(text) - _shared(text[begin:][::-1], other[begin:][::-1])


def _shared(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _own_template(loaded: Any, tokenizer_json: Path) -> str:
    try:
        text: str = loaded.get_chat_template()
    except ValueError:
        raise UserError(
            "--chat-template is tokenizer, but neither chat_template.jinja nor "
            f"tokenizer_config.json beside {tokenizer_json} holds one (or none is the default); "
            "give chatml or a Jinja file's path"
        ) from None
    return text


def _variables(loaded: Any) -> str:
    return json.dumps(loaded.special_tokens_map, sort_keys=True)


def _transformers(tokenizer_json: Path) -> Any:
    """The tokenizer as transformers sees it, with what is configured beside it."""
    from transformers import PreTrainedTokenizerFast

    directory = tokenizer_json.parent
    try:
        if tokenizer_json.name == "tokenizer.json":
            return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json))
    except Exception as error:  # noqa: BLE001 - what a damaged configuration makes the library raise
        first_line = str(error).split("\n", 1)[0]
        raise UserError(
            f"tokenizer {directory}: transformers cannot load it ({first_line}); check its "
            "tokenizer_config.json, or give --chat-template chatml"
        ) from None
