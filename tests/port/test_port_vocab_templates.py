"""Chat templates in Jinja: the same masks as ChatML's, what a template refuses, fingerprints."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from vocab_toys import END, START, V, found, line, write_tokenizer

from torch_port.data.conversations import parse_conversation
from torch_port.errors import UserError
from torch_port.vocabulary.counts import TokenCounts
from torch_port.vocabulary.templates import CHATML, ChatTemplate, encoder, resolve_template
from torch_port.vocabulary.text_corpus import TextCorpus, count_text
from torch_port.vocabulary.tokens import tokenizer_facts

QUIET = Console(quiet=True)
ASSISTANT, A, B, C, D = 2, 4, 5, 6, 7
# A newline is text between tokens here; `{{ '\n' }}` is one that Jinja does not trim.
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{{ '\\n' }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
CHATML_JINJA = TURNS + PROMPT
PLAIN = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} d {{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
# As Qwen3 writes its reasoning: only in the last turn.
REASONING = "{% if loop.last and m.role == 'assistant' %}a {% endif %}{{ m.content }}"
LAST_TURN_DIFFERS = TURNS.replace("{{ m.content }}", REASONING)
REWRITTEN = TURNS.replace("{{ m.content }}", "{{ m.content if loop.last else 'b' }}")
SMALL = [
    line(("user", "a b"), ("assistant", "b c c")),
    line(("system", "d"), ("user", "a"), ("assistant", "d"), ("user", "b"), ("assistant", "a d")),
    line(("assistant", "c"), ("user", "a")),
]


def corpus(root: Path, template: str, lines: list[str] = SMALL, length: int = 100) -> TextCorpus:
    if not (root / "tok").exists():
        write_tokenizer(root / "tok")
    (root / "chat.jinja").write_text(template)
    (root / "train.jsonl").write_text("".join(lines))
    facts = tokenizer_facts(root / "tok")
    chosen = resolve_template(str(root / "chat.jinja"), facts.file)
    return TextCorpus((root / "train.jsonl",), facts, chosen, length)


def counted(text: TextCorpus, workers: int = 1) -> TokenCounts:
    return count_text(text, V, QUIET, workers=workers, piece_bytes=100)[0]


def test_chatml_in_jinja_counts_what_chatml_counts(tmp_path: Path) -> None:
    """By hand. Faults: headers supervised; the ending left out; an assistant who speaks first
    lost; processes that render otherwise."""
    text = corpus(tmp_path, CHATML_JINJA)
    for workers in (1, 2):
        counts = counted(text, workers)
        assert found(counts) == {A: 1, B: 1, C: 3, D: 2, END: 4}
        assert (counts.samples, counts.truncated) == (3, 0)


def test_masks_are_chatmls_token_by_token(tmp_path: Path) -> None:
    """With a tokenizer that has tokens for newlines, against the built-in rendering. Faults: the
    newline after <|im_end|> supervised; the one after `assistant` too; masks cut elsewhere."""
    from torch_port.demo.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["def f(x): return x"] * 3, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>"
        "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}"
        "{% endif %}"
    )
    template = resolve_template(str(tmp_path / "chat.jinja"), tmp_path / "tokenizer.json")
    ours, theirs = (encoder(one, tmp_path / "tokenizer.json") for one in (CHATML, template))
    for one in [*SMALL, line(("user", "x"), ("assistant", "é\n\n漢字 f(x)\n"), ("user", "y"))]:
        conversation = parse_conversation(one.encode(), "")
        for length in (20, 200):
            first, second = ours(conversation, length), theirs(conversation, length)
            assert first.input_ids.tolist() == second.input_ids.tolist()
            assert first.loss_mask.tolist() == second.loss_mask.tolist()
            assert first.truncated == second.truncated


def test_a_template_without_special_tokens(tmp_path: Path) -> None:
    """Faults: nothing supervised without an ending token; the template's own words in an answer
    (here `d`) left out; a prompt's word `assistant` counted."""
    counts = counted(corpus(tmp_path, PLAIN, SMALL[:2]))
    assert found(counts) == {A: 1, B: 1, C: 2, D: 2 + 3}
    assert ASSISTANT not in found(counts)


def test_a_whole_text_is_what_transformers_tokenizes(tmp_path: Path) -> None:
    """Faults: special tokens put before the text a second time, as tokenizer.json asks for plain
    text; a generation prompt at the end."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    text = corpus(tmp_path, CHATML_JINJA)
    file = str(text.tokenizer.file)
    beginning = Tokenizer.from_file(file)
    beginning.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
    )
    beginning.save(file)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
    assert tokenizer("a")["input_ids"] == [START, A]
    for one in SMALL:
        conversation = parse_conversation(one.encode(), "")
        messages = [turn.model_dump() for turn in conversation.conversations]
        whole = tokenizer.apply_chat_template(messages, chat_template=CHATML_JINJA)["input_ids"]
        sample = encoder(text.chat_template, text.tokenizer.file)(conversation, 100)
        assert sample.input_ids.tolist() == whole


@pytest.mark.parametrize("prompt", ["assistant ", "assistant c "])
def test_earlier_turns_without_the_thinking_of_the_last(tmp_path: Path, prompt: str) -> None:
    """By hand, as Qwen3 renders: `a` stands for the thinking, in the last turn alone; the second
    generation prompt begins a thought (`c`) that earlier turns do not have. Faults: conversations
    of several turns refused; the header or the next turn's supervised; an answer's first token
    lost, as where it begins like the thought."""
    opening = prompt.removeprefix("assistant ")
    thinking = LAST_TURN_DIFFERS.replace("a {% endif %}", opening + "a {% endif %}")
    template = thinking + PROMPT.replace("assistant ", prompt)
    two = line(("user", "a"), ("assistant", "c d"), ("user", "b"), ("assistant", "d"))
    text = corpus(tmp_path, template, [two])
    # The last turn: a d, its thought's opening being the prompt's.
    assert found(counted(text)) == {A: 1, C: 1, D: 2, END: 2}
    sample = encoder(text.chat_template, text.tokenizer.file)(
        parse_conversation(two.encode(), ""), 100
    )
    assert sample.loss_mask.tolist()[:13] == [0] * 6 + [1] * 3 + [0] * 4


def test_what_a_template_cannot_say_is_refused(tmp_path: Path) -> None:
    """Faults: a wrong mask from a template that rewrites earlier turns; Jinja's traceback; a
    message without the conversation's place."""
    text = corpus(tmp_path, REWRITTEN + PROMPT, SMALL[:2])
    with pytest.raises(UserError, match=r"jsonl:1: --chat-template chat\.jinja: .* turn 2 "):
        counted(text)
    twice = TURNS.replace(
        "{{ m.content }}",
        "{{ m.content }}{% if m.role == 'assistant' and not "
        "loop.last %} {{ m.content }}{% endif %}",
    )
    with pytest.raises(UserError, match=r"jsonl:2: .* turn 3 "):
        counted(corpus(tmp_path, twice + PROMPT, SMALL[:2]))
    strict = (
        CHATML_JINJA
        + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    with pytest.raises(UserError, match=r"jsonl:2: .*cannot render the conversation \(no system\)"):
        counted(corpus(tmp_path, strict, SMALL[:2]))
    with pytest.raises(UserError, match=r"jsonl:1: .*cannot render"):
        counted(corpus(tmp_path, "{% for m in %}"))
    silent = "{% for m in messages %}{{ m.content }} {% endfor %}"  # no generation prompt
    with pytest.raises(UserError, match=r"jsonl:3: .*turn 1 \(assistant\)"):
        counted(corpus(tmp_path, silent))


def test_the_tokenizers_own_template(tmp_path: Path) -> None:
    """Faults: another file's template; its special tokens unknown to the template, or no part of
    the fingerprint. chat_template.jinja goes before tokenizer_config.json."""
    text = corpus(tmp_path, CHATML_JINJA)
    tok, facts = tmp_path / "tok", text.tokenizer
    for path in ("tokenizer", "llama3"):
        with pytest.raises(UserError, match=f"--chat-template is '?{path}'?, .*give chatml"):
            resolve_template(path, facts.file)
    assert resolve_template("chatml", facts.file) == CHATML

    def own(**config: str) -> TextCorpus:
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
        (tok / "tokenizer_config.json").write_text(json.dumps(config))
        return TextCorpus(text.files, facts, resolve_template("tokenizer", facts.file), 100)

    ended = CHATML_JINJA.replace("<|im_end|>", " {{ eos_token }}")
    first = own(chat_template=ended, eos_token="<|im_end|>")
    assert found(counted(first)) == found(counted(text))
    assert counted(first).source == "conversations, tokenizer, max_length 100"
    other = own(chat_template=ended, eos_token="d")
    assert counted(other).counts[D] == 2 + 4
    assert other.fingerprint() != first.fingerprint()
    (tok / "chat_template.jinja").write_text(PLAIN)
    assert resolve_template("tokenizer", facts.file).text == PLAIN


def test_the_templates_text_is_in_the_fingerprint(tmp_path: Path) -> None:
    """Faults: cached counts of another template of the same name; a file's name that counts."""
    cache = tmp_path / "cache"
    text = corpus(tmp_path, CHATML_JINJA)
    assert not count_text(text, V, QUIET, cache=cache)[1]
    assert count_text(text, V, QUIET, cache=cache)[1]
    changed = corpus(tmp_path, CHATML_JINJA + "{# #}")
    assert not count_text(changed, V, QUIET, cache=cache)[1]
    renamed = ChatTemplate("other.jinja", CHATML_JINJA, True, text.chat_template.variables)
    again = TextCorpus(text.files, text.tokenizer, renamed, 100)
    assert again.fingerprint() == text.fingerprint()
