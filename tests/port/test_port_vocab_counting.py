"""Counting text: by hand, in pieces, in processes, cached."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from vocab_toys import END, V_TOK, V, found, line, write_tokenizer

from torch_port.errors import UserError
from torch_port.vocabulary import text_corpus
from torch_port.vocabulary.counts import load_counts, save_counts
from torch_port.vocabulary.templates import CHATML
from torch_port.vocabulary.text_corpus import TextCorpus, count_text
from torch_port.vocabulary.tokens import tokenizer_facts

QUIET = Console(quiet=True)
A, B, C, D = 4, 5, 6, 7
SMALL = [
    line(("user", "a b"), ("assistant", "b c c")),
    "\n",
    line(("system", "d"), ("user", "a"), ("assistant", "d"), ("user", "b"), ("assistant", "a d")),
]


def corpus(
    root: Path, lines: list[str] | None = None, max_length: int = 100, tokenizer: str = "tok"
) -> TextCorpus:
    if not (root / tokenizer).exists():
        write_tokenizer(root / tokenizer)
    if lines is not None or not (root / "train.jsonl").exists():
        (root / "train.jsonl").write_text("".join(SMALL if lines is None else lines))
    facts = tokenizer_facts(root / tokenizer)
    return TextCorpus((root / "train.jsonl",), facts, CHATML, max_length)


def test_a_corpus_counted_by_hand(tmp_path: Path) -> None:
    """Faults: prompts, headers or newlines counted; the answer's ending left out."""
    counts, cached = count_text(corpus(tmp_path), V, QUIET)
    assert found(counts) == {A: 1, B: 1, C: 2, D: 2, END: 3}
    assert (counts.samples, counts.truncated, counts.supervised, counts.distinct) == (2, 0, 9, 5)
    assert (len(counts.counts), counts.tokenizer_size, cached) == (V, V_TOK, False)
    assert counts.special_ids.tolist() == [8, 9]


def test_what_is_cut_does_not_count(tmp_path: Path) -> None:
    """Fault: counting what training never sees. Eight positions: start user a b end start
    assistant b | c c end, and start system d end start user a end | …: nothing supervised."""
    counts, _ = count_text(corpus(tmp_path, max_length=8), V, QUIET)
    assert found(counts) == {B: 1}
    assert counts.truncated == 2
    with pytest.raises(UserError, match=r"no supervised token.*--max-length 4"):
        count_text(corpus(tmp_path, max_length=4), V, QUIET)


def test_a_tokenizers_own_truncation_is_not_followed(tmp_path: Path) -> None:
    """Fault: tokenizer.json says 1 token per text, and every answer is one token long."""
    write_tokenizer(tmp_path / "cutting", truncate=1)
    counts, _ = count_text(corpus(tmp_path, tokenizer="cutting"), V, QUIET)
    assert counts.supervised == 9


def many_lines() -> list[str]:
    """Conversations of drawn words, with blank lines, Windows' line ends and wide characters."""
    random = np.random.default_rng(3)
    lines = []
    for n in range(150):
        words = random.choice(["a", "b", "c", "d", "é", "漢字"], random.integers(0, 9))
        lines.append(line(("user", "q" * random.integers(0, 50)), ("assistant", " ".join(words))))
        lines.append(("\n", "  \r\n", "")[n % 3])
    return lines


def by_words(lines: list[str]) -> dict[int, int]:
    """Count answers without the port's reader, tokenizer or masks."""
    import json

    ids = {"a": A, "b": B, "c": C, "d": D, "é": 0, "漢字": 0}
    counts: Counter[int] = Counter()
    for text in filter(str.strip, lines):
        counts.update(ids[word] for word in json.loads(text)["conversations"][1]["content"].split())
        counts[END] += 1
    return dict(counts)


def test_processes_count_what_one_process_counts(tmp_path: Path) -> None:
    """Faults: a line read by two pieces or by none; a part lost between processes."""
    lines = many_lines()
    text = corpus(tmp_path, lines)
    expected = by_words(lines)
    serial, _ = count_text(text, V, QUIET)
    parallel, _ = count_text(text, V, QUIET, workers=2, piece_bytes=997)
    assert found(serial) == expected
    assert found(parallel) == expected
    assert serial.samples == parallel.samples == 150
    assert serial.corpus_fingerprint == parallel.corpus_fingerprint


def test_every_cut_of_a_file_reads_each_line_once(tmp_path: Path) -> None:
    """Fault: a border just before, on or just after a line end."""
    text = corpus(tmp_path, ["\n", *SMALL, "\n"])
    length = text.files[0].stat().st_size
    for piece_bytes in range(1, length + 2, 5):
        pieces = text_corpus.text_pieces(text.files, piece_bytes)
        got = [c for piece in pieces for c in text_corpus._conversations(piece)]
        assert [len(c.conversations) for _, c in got] == [2, 5], piece_bytes


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    """Fault: the line's number within its piece, or a traceback out of a process."""
    text = corpus(tmp_path, [*SMALL, '{"id": "x", "conversations": [{"role": "tool"}]}\n'])
    for workers, piece_bytes in ((1, 1 << 20), (1, 50), (2, 50)):
        with pytest.raises(UserError, match=r"train\.jsonl:4: .*role"):
            count_text(text, V, QUIET, workers=workers, piece_bytes=piece_bytes)


def test_a_corpus_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: counts of the new text, kept in the cache under the fingerprint of the old one."""
    text, counting = corpus(tmp_path), text_corpus._count_pieces

    def late(*arguments: object) -> object:
        with open(text.files[0], "a") as stream:
            stream.write(SMALL[0])
        return counting(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(text_corpus, "_count_pieces", late)
    with pytest.raises(UserError, match=r"train\.jsonl: changed while it was counted"):
        count_text(text, V, QUIET, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def die(piece: object) -> None:
    os._exit(3)


def test_a_process_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: waiting for ever, or counts without its part."""
    monkeypatch.setattr(text_corpus, "_count", die)
    with pytest.raises(UserError, match="--workers is 2, lower it"):
        count_text(corpus(tmp_path), V, QUIET, workers=2, piece_bytes=50)


def test_settings_that_would_count_something_else(tmp_path: Path) -> None:
    text = corpus(tmp_path)
    twice = TextCorpus(text.files * 2, text.tokenizer, CHATML, 100)
    absent = TextCorpus((tmp_path / "no.jsonl",), text.tokenizer, CHATML, 100)
    for wrong, words in (
        (twice, "given twice"),
        (absent, "no.jsonl: expected a JSONL file"),
        (corpus(tmp_path, max_length=1), "--max-length is 1"),
    ):
        with pytest.raises(UserError, match=words):
            count_text(wrong, V, QUIET)
    with pytest.raises(UserError, match=r"produces 10 ids, but vocab_size is 9"):
        count_text(text, 9, QUIET)
    with pytest.raises(UserError, match="--workers is 0"):
        count_text(text, V, QUIET, workers=0)


# --- the cache ---


def no_counting(*_: object) -> None:
    raise AssertionError("it was counted again")


def test_nothing_changed_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a key of times or absolute places. The corpus moves, and its file is touched."""
    cache = tmp_path / "cache" / "new"
    first, cached = count_text(corpus(tmp_path), V, QUIET, cache=cache)
    assert not cached
    moved = tmp_path / "moved"
    moved.mkdir()
    monkeypatch.setattr(text_corpus, "_count_pieces", no_counting)
    again, cached = count_text(corpus(moved), V, QUIET, cache=cache)
    assert cached
    assert found(again) == found(first)
    assert again.samples == 2


@pytest.mark.parametrize("change", ["content", "name", "order", "length", "tokenizer", "V", "chat"])
def test_any_change_counts_again(tmp_path: Path, change: str) -> None:
    """Fault: stale counts of another corpus, tokenizer, template, length or V."""
    cache = tmp_path / "cache"
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(SMALL[0])
    two.write_text(SMALL[2])
    facts = tokenizer_facts(write_tokenizer(tmp_path / "tok"))
    files, length, size, template = (one, two), 100, V, CHATML
    assert not count_text(TextCorpus(files, facts, template, length), size, QUIET, cache=cache)[1]
    assert count_text(TextCorpus(files, facts, template, length), size, QUIET, cache=cache)[1]
    if change == "content":
        two.write_text(SMALL[2].replace("a d", "d a"))  # same size, same counts even
    elif change == "name":
        files = (one, two.rename(tmp_path / "three.jsonl"))
    elif change == "order":
        files = (two, one)
    elif change == "length":
        length = 101
    elif change == "tokenizer":
        facts = tokenizer_facts(write_tokenizer(tmp_path / "other", "e"))
    elif change == "V":
        size = V + 1
    else:
        template = replace(CHATML, text="another template")
    assert not count_text(TextCorpus(files, facts, template, length), size, QUIET, cache=cache)[1]


def test_damaged_cache_is_counted_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, _ = count_text(corpus(tmp_path), V, QUIET, cache=cache)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    again, cached = count_text(corpus(tmp_path), V, QUIET, cache=cache)
    assert not cached
    assert found(again) == found(first)
    assert count_text(corpus(tmp_path), V, QUIET, cache=cache)[1]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="TORCH_PORT_CACHE"):
        count_text(corpus(tmp_path), V, QUIET, cache=tmp_path / "file" / "below")


KILLED = """
import os, signal, sys
from pathlib import Path
from dataclasses import replace
from torch_port.vocabulary.counts import load_counts, save_counts

path = Path(sys.argv[1])
counts = load_counts(path)
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save_counts(path, replace(counts, samples=counts.samples + 1))
"""


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    """Fault: a file written in place, half of it there when the process dies."""
    counts, _ = count_text(corpus(tmp_path), V, QUIET)
    path = tmp_path / "counts"
    save_counts(path, counts)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -9
    assert path.read_bytes() == before
    assert load_counts(path).samples == 2


def test_unreadable_counts_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    counts, _ = count_text(corpus(tmp_path), V, QUIET)
    beyond = counts.counts.copy()
    beyond[V_TOK] = 1
    odd = {
        "beyond": replace(counts, counts=beyond),
        "negative": replace(counts, counts=-counts.counts),
        "narrow": replace(counts, counts=counts.counts.astype(np.int32)),
        "pin": replace(counts, special_ids=np.array([V_TOK])),
        "mass": replace(counts, mass=np.zeros(V - 1)),
    }
    for name, wrong in odd.items():
        save_counts(tmp_path / name, wrong)
    save_file({"counts": counts.counts}, tmp_path / "other")
    (tmp_path / "text").write_text("{}")
    for name in [*odd, "other", "text", "absent"]:
        with pytest.raises(UserError, match="no token counts could be read"):
            load_counts(tmp_path / name)
