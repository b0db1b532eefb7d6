"""Conversations: errors by file and line, exact masks, special-token text stays text."""

import json

import numpy as np
import pytest

from torch_port.anchors import is_trainable
from torch_port.data.conversations import (
    Conversation,
    DataError,
    encode_conversation,
    encode_file,
    read_conversations,
)
from torch_port.demo.tokenizer import SPECIAL_TOKENS, special_ids, train_tokenizer
from torch_port.errors import UserError

GOOD = json.dumps({"id": "a", "conversations": [{"role": "user", "content": "x"}]})


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x + 1\n", "user\nassistant\n"] * 3, 300)


def conversation(*turns):
    return Conversation.model_validate(
        {"id": "c", "conversations": [{"role": role, "content": text} for role, text in turns]}
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{not json", "JSON"),
        ('{"id": "b"', "JSON"),
        ("[1, 2]", "object"),
        ('{"id": "b", "conversations": []}', "at least 1"),
        ('{"conversations": [{"role": "user", "content": "x"}]}', "id"),
        ('{"id": "b"}', "conversations"),
        ('{"id": "b", "conversations": [{"role": "robot", "content": "x"}]}', "'robot'"),
        ('{"id": "b", "conversations": [{"role": "user"}]}', "conversations.0.content"),
        ('{"id": "b", "conversations": [{"role": "user", "content": 3}]}', "found 3"),
        ('{"id": "b", "conversations": [{"content": "x"}]}', "conversations.0.role"),
        ('{"id": "\\ud800", "conversations": [{"role": "user", "content": "x"}]}', "JSON"),
    ],
)
def test_bad_line_is_named_with_file_and_line(tmp_path, line, found):
    # Fault: a line number that skips blank lines (the bad line is the 4th), or a bare pydantic
    # error that names neither file nor remedy.
    path = tmp_path / "data.jsonl"
    path.write_text(f"{GOOD}\n\n{GOOD}\n{line}\n{GOOD}\n")
    reader = read_conversations(path)
    assert [next(reader).id, next(reader).id] == ["a", "a"]  # streamed: good lines come first
    with pytest.raises(DataError, match=r"data\.jsonl:4: ") as caught:
        next(reader)
    assert found in str(caught.value)
    assert "Write each line as" in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert isinstance(caught.value, UserError)


def test_bytes_that_are_no_utf8_and_a_missing_file(tmp_path):
    # Fault: a UnicodeDecodeError or FileNotFoundError instead of an error for users.
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"id": "\xff", "conversations": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(DataError, match=r"data\.jsonl:1: "):
        list(read_conversations(path))
    with pytest.raises(DataError, match=r"absent.jsonl: .*No such file"):
        list(read_conversations(tmp_path / "absent.jsonl"))


def test_supervised_tokens_decode_to_the_answers(tokenizer):
    # Fault: a mask shifted by one, or one that misses the end of turn or covers the header.
    sample = encode_conversation(
        tokenizer,
        conversation(
            ("system", "be brief"),
            ("user", "f?"),
            ("assistant", "    return x"),
            ("user", "more"),
            ("assistant", ""),
            ("assistant", "ü\n"),
        ),
        max_length=1000,
    )
    assert sample.input_ids.dtype == np.int64
    assert sample.loss_mask.dtype == np.float32
    supervised = sample.input_ids[sample.loss_mask > 0.5]
    assert (
        tokenizer.decode(supervised, skip_special_tokens=False)
        == "    return x<|im_end|><|im_end|>ü\n<|im_end|>"
    )
    assert tokenizer.decode(sample.input_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nf?<|im_end|>\n"
        "<|im_start|>assistant\n    return x<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\nü\n<|im_end|>\n"
    )
    assert set(np.unique(sample.loss_mask)) == {0.0, 1.0}


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_special_text_in_content_stays_text(tokenizer, token, role):
    # Fault: content that forges a turn. Only the rendering may put special tokens.
    ids = special_ids(tokenizer)
    sample = encode_conversation(tokenizer, conversation((role, f"a {token} b{token}")), 1000)
    specials = [i for i in sample.input_ids.tolist() if i in ids.all()]
    assert specials == [ids.turn_start, ids.turn_end]
    text = tokenizer.decode(sample.input_ids, skip_special_tokens=False)
    assert text == f"<|im_start|>{role}\na {token} b{token}<|im_end|>\n"
    # The tokenizer's own switch is as it was: the caller's text may use special tokens.
    assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]


def test_truncation_and_its_errors(tokenizer):
    # Fault: mask and ids cut to different lengths; a max_length that leaves no label.
    whole = encode_conversation(tokenizer, conversation(("assistant", "return x")), 1000)
    cut = encode_conversation(tokenizer, conversation(("assistant", "return x")), 5)
    assert (cut.truncated, whole.truncated) == (True, False)
    np.testing.assert_array_equal(cut.input_ids, whole.input_ids[:5])
    np.testing.assert_array_equal(cut.loss_mask, whole.loss_mask[:5])
    with pytest.raises(DataError, match="max_length"):
        encode_conversation(tokenizer, conversation(("assistant", "x")), 1)


def test_tokenizer_without_chatml_is_refused():
    from tokenizers import Tokenizer, models

    with pytest.raises(DataError, match=r"<\|im_start\|>"):
        encode_conversation(Tokenizer(models.BPE()), conversation(("user", "x")), 9)


def test_untrainable_conversations_are_dropped_with_a_count(tokenizer, tmp_path):
    # Fault: samples without an anchor reach one rank's batch (contracts §5). An empty answer has
    # one supervised token (its end of turn): no two adjacent ones.
    path = tmp_path / "data.jsonl"
    rows = [
        ("user", "only asked"),
        ("assistant", ""),
        ("assistant", "yes"),
        ("assistant", "x" * 99),
    ]
    path.write_text(
        "".join(
            json.dumps({"id": str(i), "conversations": [{"role": role, "content": text}]}) + "\n"
            for i, (role, text) in enumerate(rows)
        )
    )
    samples, stats = encode_file(tokenizer, path, 40)
    assert [sample.id for sample in samples] == ["2", "3"]
    assert (stats.kept, stats.untrainable, stats.truncated) == (2, 2, 1)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([], False), ([1], False), ([1, 0, 1], False), ([0, 1, 1], True), ([1, 1, 0], True)],
)
def test_is_trainable(mask, expected):
    # Fault: "any supervised token" instead of two adjacent ones.
    assert is_trainable(np.array(mask, np.float32)) is expected
