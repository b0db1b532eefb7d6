"""`torch-port data prepare`: what becomes of conversations, and that interruptions cost nothing."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from data_toys import (
    ASSISTANT,
    END,
    QUIET,
    START,
    USER,
    A,
    B,
    C,
    contents,
    corpus,
    drawn_lines,
)

import torch_port.data.prepare as prepare_module
from torch_port.data.conversations import DataError
from torch_port.data.features import FeatureDirectory
from torch_port.data.prepare import (
    CUT_OFF,
    NO_ANSWER,
    TEMPLATE,
    TOO_SHORT,
    UNREADABLE,
    prepare_corpus,
)
from torch_port.data.templates import ChatTemplate
from torch_port.data.text_pieces import read_lines, text_pieces


def said(user: str, assistant: str, name: str = "x") -> dict:
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"id": name, "conversations": turns}


def test_ids_and_masks_by_hand(tmp_path: Path) -> None:
    """Faults: from/value/human/gpt not read; thinking lost from the content, or not supervised;
    a mask that covers the header; ids and masks of two samples exchanged."""
    lines = [
        said("a", "b c", "first"),
        {"id": 7, "messages": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]},
        {"messages": [{"role": "assistant", "reasoning_content": "a", "content": "b"}]},
    ]
    text = corpus(tmp_path, lines)
    summary = prepare_corpus(text, tmp_path / "out", QUIET)
    read = FeatureDirectory(tmp_path / "out")
    at = len(json.dumps(lines[0])) + len(json.dumps(lines[1])) + 2
    assert read.ids == ["first", "7", f"train.jsonl@{at}"]
    expected = [
        ([START, USER, A, END, START, ASSISTANT, B, C, END], [0] * 6 + [1] * 3),
        ([START, USER, B, END, START, ASSISTANT, C, END], [0] * 6 + [1] * 2),
        # <think>, a, </think>, b: the tags are unknown words here.
        ([START, ASSISTANT, 0, A, 0, B, END], [0] * 2 + [1] * 5),
    ]
    for i, (ids, mask) in enumerate(expected):
        assert read.tokens(i)["input_ids"].tolist() == ids
        assert read.tokens(i)["loss_mask"].tolist() == mask
    assert read.lengths == [9, 8, 7]
    assert read.supervised == [3, 2, 5]
    assert read.trainable == [True] * 3
    assert (summary.kept, summary.tokens, summary.supervised, summary.dropped) == (3, 24, 10, {})


def test_what_cannot_train_is_dropped_counted_and_listed(tmp_path: Path) -> None:
    """Faults: a sample without an anchor candidate kept; a reason that does not say whether a
    longer --max-length would help; drops without a list; a bad line that stops everything."""
    lines = [
        said("a", "b c", "kept"),
        said("a", "", "short"),
        said("a a a a a a a", "b c", "cut"),
        said("a", "b b b b b", "kept-and-cut"),
        {"id": "asked", "messages": [{"role": "user", "content": "a"}]},
        {"id": "tool", "messages": [{"role": "tool", "content": "a"}]},
        "{no json",
    ]
    out = tmp_path / "out"
    summary = prepare_corpus(corpus(tmp_path, lines, length=9), out, QUIET)
    assert FeatureDirectory(out).ids == ["kept", "kept-and-cut"]
    assert (summary.kept, summary.truncated) == (2, 1)
    drops = [json.loads(line) for line in (out / "drops.jsonl").read_text().splitlines()]
    assert [(drop["id"], drop["reason"]) for drop in drops[:3]] == [
        ("short", TOO_SHORT),
        ("cut", CUT_OFF),
        ("asked", NO_ANSWER),
    ]
    assert [drop["reason"] for drop in drops[3:]] == [UNREADABLE] * 2
    assert "'tool'" in drops[3]["detail"]
    assert summary.dropped == Counter(drop["reason"] for drop in drops)
    with pytest.raises(DataError, match="1 × no assistant turn"):
        prepare_corpus(corpus(tmp_path / "b", [lines[4]]), tmp_path / "b" / "out", QUIET)


def test_a_conversation_that_the_template_refuses_is_dropped(tmp_path: Path) -> None:
    """Fault: one conversation that a template does not render ends the run."""
    refusing = ChatTemplate(
        "t.jinja",
        "{% for m in messages %}{% if m.content == 'd' %}{{ raise_exception('no d') }}{% endif %}"
        "{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}",
        jinja=True,
        variables="{}",
    )
    lines = [said("a", "b c", "good"), said("d", "b c", "bad")]
    summary = prepare_corpus(corpus(tmp_path, lines, template=refusing), tmp_path / "out", QUIET)
    assert summary.kept == 1
    assert summary.dropped == {TEMPLATE: 1}
    assert "no d" in (tmp_path / "out" / "drops.jsonl").read_text()


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """Faults: shards in the order in which processes finish; a header in random order; a line
    taken by two pieces, or by none."""
    lines = drawn_lines(60)
    text = corpus(tmp_path, lines, size=1000)
    prepare_corpus(text, tmp_path / "one", QUIET)
    prepare_corpus(text, tmp_path / "two", QUIET, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    read = FeatureDirectory(tmp_path / "one")
    assert read.ids == [line["id"] for line in lines]
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 5


def test_pieces_hold_every_line_once(tmp_path: Path) -> None:
    """Pieces of every size, so that some begin where a line does. Faults: such a line lost; one
    read by two pieces; a blank line read."""
    file = tmp_path / "lines"
    file.write_bytes(b"one\n\ntwo and more\n3\n\n\nfour")
    for size in range(1, 40):
        found = [line for piece in text_pieces([file], size) for line in read_lines(piece)]
        assert found == [(0, b"one\n"), (5, b"two and more\n"), (18, b"3\n"), (22, b"four")]


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from data_toys import QUIET, corpus, drawn_lines
import torch_port.data.prepare as module
write = module._write
def slow(*given):
    write(*given)
    print("shard", flush=True)
    time.sleep(0.2)
module._write = slow
module.prepare_corpus(corpus(Path({root!r}), drawn_lines(60), size=1000), Path({out!r}), QUIET)
"""


def test_a_killed_run_goes_on_with_the_next_shard(tmp_path: Path) -> None:
    """SIGKILL after the third shard. Faults: finished shards made again; bytes that differ from an
    uninterrupted run's; what the dead process left behind stays."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    code = KILLED.format(tests=str(Path(__file__).parent), root=str(tmp_path / "c"), out=str(out))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(3):
        assert child.stdout.readline() == "shard\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    (out / ".tokens-00004.safetensors.1234.tmp").write_bytes(b"half")
    finished = {file: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    assert len(finished) >= 3
    assert not (out / "index.json").exists()
    text = corpus(tmp_path / "c", drawn_lines(60), size=1000)
    prepare_corpus(text, out, QUIET)
    prepare_corpus(text, whole, QUIET)
    assert contents(out) == contents(whole)
    assert all(file.stat().st_mtime_ns == then for file, then in finished.items())


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a second start encodes everything anew, or tells another summary."""
    text = corpus(tmp_path, drawn_lines(5))
    first = prepare_corpus(text, tmp_path / "out", QUIET)
    monkeypatch.setattr(prepare_module, "_Encoder", None)
    assert prepare_corpus(text, tmp_path / "out", QUIET) == first


@pytest.mark.parametrize(
    ("change", "named"),
    [({"length": 49}, "max_length was 50, is 49"), ({"lines": 6}, "corpus was")],
)
def test_other_inputs_are_refused(tmp_path: Path, change: dict, named: str) -> None:
    """Fault: shards of two corpora, or of two lengths, mixed in one directory."""
    out = tmp_path / "out"
    prepare_corpus(corpus(tmp_path, drawn_lines(5)), out, QUIET)
    before = contents(out)
    other = corpus(tmp_path, drawn_lines(change.get("lines", 5)), length=change.get("length", 50))
    with pytest.raises(DataError, match=named):
        prepare_corpus(other, out, QUIET)
    assert contents(out) == before


def test_a_corpus_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: shards of two versions of a file under the fingerprint of the first."""
    text = corpus(tmp_path, drawn_lines(5))
    real = prepare_module._write

    def late(*given: object) -> None:
        real(*given)  # type: ignore[arg-type]
        with open(text.files[0], "a") as stream:
            stream.write("\n")

    monkeypatch.setattr(prepare_module, "_write", late)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare_corpus(text, tmp_path / "out", QUIET)
    assert not (tmp_path / "out" / "index.json").exists()


def test_somebody_elses_directory_and_a_second_writer_are_refused(tmp_path: Path) -> None:
    """Faults: files among those of another directory; two runs that remove each other's temporary
    files."""
    text = corpus(tmp_path, drawn_lines(3))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds no prepare\.json"):
        prepare_corpus(text, tmp_path / "theirs", QUIET)
    prepare_corpus(text, tmp_path / "out", QUIET)
    with open(tmp_path / "out" / "prepare.json", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is writing"):
            prepare_corpus(text, tmp_path / "out", QUIET)
    prepare_corpus(text, tmp_path / "out", QUIET)


ORPHANS = """
import os, sys, time
from torch_port.data.parallel import in_processes
def start(): pass
def work(n):
    time.sleep(0.01)
    return os.getpid()
if __name__ == "__main__":
    for pid in in_processes(work, range(1000000), 2, start, ()):
        print(pid, flush=True)
"""


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """Fault: SIGKILL of the command leaves its processes waiting for ever."""
    (tmp_path / "parent.py").write_text(ORPHANS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    pids = {int(child.stdout.readline()) for _ in range(20)}
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(_runs(pid) for pid in pids):
        time.sleep(0.1)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
