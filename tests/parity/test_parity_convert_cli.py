"""`parity convert | show | diff` as a user sees them: words, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from format_toys import CASES, H, draft_tensors, hf_fields, write, write_draft, write_target

import parity.cli
from parity.convert import convert


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the command line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["parity", *map(str, words)])
        patch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as ended:
            parity.cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_convert_show_and_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults: orbax refused as torch-port does; a loss or a note not printed; a difference that
    exits 0; weights whose fingerprint depends on the format.
    """
    first = write_draft(tmp_path / "hf", CASES["vanilla"])
    status, out, _ = run(capsys, "convert", first, tmp_path / "o", "--to", "orbax")
    assert (status, out) == (0, f"{first} (hf) -> {tmp_path / 'o'} (orbax)\n")
    shown = [json.loads(run(capsys, "show", p, "--json")[1]) for p in (first, tmp_path / "o")]
    assert [s.pop("format") for s in shown] == ["hf", "orbax"]
    assert shown[0] == shown[1]
    assert shown[1]["map"].startswith("5 ids (31.2% of V), first [0, 3, 4, 9, 12], sha256 ")
    assert run(capsys, "diff", first, tmp_path / "o")[:2] == (0, "no difference\n")
    target = write_target(tmp_path / "t")
    to = ("--to", "deepspec", "--target", target)
    assert run(capsys, "convert", tmp_path / "o", tmp_path / "d", *to)[0] == 0
    status, out, _ = run(capsys, "convert", tmp_path / "d", tmp_path / "h", "--to", "hf")
    assert status == 0
    assert "left behind: lm_head.weight [5, 8]\n" in out
    assert "left behind: embed_tokens.weight [16, 8]\n" in out
    with_head = ("--to", "hf", "--with-head", "--target", target)
    assert run(capsys, "convert", tmp_path / "o", tmp_path / "h2", *with_head)[0] == 0
    status, out, _ = run(capsys, "diff", tmp_path / "h", tmp_path / "h2")
    assert status == 1
    assert [
        word in out for word in ("lm_head.weight", "absent", "BF16 [5, 8]", "1 difference")
    ] == [True] * 4


def test_diff_names_config_map_and_largest_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: eps 1e-6 against 1e-5, id 12 against 13, one weight moved by 0.5.

    Faults: a difference that no line names; the size of another element.
    """
    case = CASES["vanilla"]
    first = write_draft(tmp_path / "a", case, dtype=torch.float32)
    tensors = draft_tensors(case, torch.float32)
    tensors["norm.weight"][3] += 0.5
    tensors["norm.weight"][1] -= 0.25
    tensors["t2d"][12], tensors["t2d"][13] = False, True
    tensors["d2t"][4] = 9
    other = write(tmp_path / "b", hf_fields(case) | {"rms_norm_eps": 1e-5}, tensors)
    convert(other, tmp_path / "o", "orbax")
    status, out, _ = run(capsys, "diff", first, tmp_path / "o")
    lines = [line.replace("│", " ").split() for line in out.splitlines()]
    assert status == 1
    assert ["config", "rms_norm_eps", "1e-06", "1e-05"] in lines
    assert ["norm.weight", "0.5"] in lines
    assert ["t2d", "1"] in lines
    assert ["d2t", "1"] in lines
    assert "4 differences" in out


def test_errors_are_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults: a traceback; status 1, which means "they differ"; a half-written directory."""
    first = write_draft(tmp_path / "hf", CASES["dflash"])
    convert(first, tmp_path / "o", "orbax")
    damaged = write_draft(tmp_path / "x", CASES["full vocabulary"])
    tensors = draft_tensors(CASES["full vocabulary"])
    del tensors["fc.weight"]
    tensors["norm.weight"] = torch.zeros(H + 1)
    bare = write(tmp_path / "bare", hf_fields(CASES["full vocabulary"]), tensors)
    (damaged / "model.safetensors").write_bytes(b"\0" * 40)
    for words, said in (
        (("convert", first, tmp_path / "o", "--to", "orbax"), "exists already"),
        (("convert", first, tmp_path / "n", "--to", "orbit"), "unknown format; there are port"),
        (("convert", tmp_path / "o", tmp_path / "n", "--to", "deepspec"), "--target DIR"),
        (("convert", damaged, tmp_path / "n", "--to", "orbax"), "copy the checkpoint again"),
        (("convert", bare, tmp_path / "n", "--to", "orbax"), "fc.weight: missing; norm.weight"),
        (("show", tmp_path / "nowhere"), "no such directory"),
        (("diff", first, tmp_path), "no checkpoint"),
    ):
        status, out, err = run(capsys, *words)
        assert (status, out) == (2, ""), words
        last = err.strip().splitlines()[-1]
        assert last.startswith("Error: "), err
        assert said in last
        assert "Traceback" not in err
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("command", ["convert", "show", "diff"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: exit statuses that a script must guess; no example."""
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "Exit status: 0" in out
    assert f"Example: parity {command}" in out
