"""Corpus: what a pair is, the split by module, determinism, and files that do not parse."""

import json

import pytest

from torch_port.demo.corpus import build_corpus, function_pairs, is_heldout
from torch_port.demo.recipe import Recipe
from torch_port.errors import UserError

RECIPE = Recipe(
    name="test",
    heldout_percent=40,
    target_steps=1,
    target_batch=1,
    target_lr=1e-3,
    target_warmup=1,
    capture_train=1,
    capture_heldout=1,
)

SOURCE = '''
import os

if os.name:
    def one(a,
            b=1):
        """Sum.

        Both.
        """
        # why
        return (a +
                b)
else:
    def one(a):
        "Other."
        return a

class Box:
    class Lid:
        async def close(self):
            """Close \\d."""
            def inner():
                """Not a pair of its own."""
                return 1
            return inner

    def undocumented(self):
        return 1

    def abstract(self):
        """Only words."""

    def line(self): "doc"; return 1
'''


def test_pairs_of_a_module():
    # Faults: the docstring left in the answer, a comment lost, decorators or indentation kept,
    # one id for two definitions, functions without a body.
    pairs = {pair.name: pair for pair in function_pairs(SOURCE)}
    assert list(pairs) == ["one", "one#2", "Box.Lid.close"]
    assert pairs["one"].ask == ('def one(a,\n        b=1):\n    """Sum.\n\n    Both.\n    """')
    assert pairs["one"].answer == "# why\nreturn (a +\n        b)"
    assert pairs["one#2"].answer == "return a"
    assert pairs["Box.Lid.close"].answer.startswith('def inner():\n    """Not a pair')


def module(i):
    return f'def f{i}(x):\n    """Add {i}."""\n    return x + {i}\n'


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "lib"
    for name in ("site-packages", "test", "pkg/tests", "pkg"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "__init__.py").write_text(module(name.replace("-", "_")[-3:]))
    for i in range(30):
        (root / f"m{i}.py").write_text(module(i) + module(i + 100))
    (root / "broken.py").write_text("def f(:\n")
    (root / "latin.py").write_bytes(b'# \xe9\ndef f():\n    "x"\n    return 1\n')
    return root


def test_split_is_by_module_deterministic_and_counts_skipped_files(tmp_path, library):
    # Faults: a split by function, python's salted hash(), test suites or packages in the corpus,
    # a file that stops the build.
    runs = []
    for run in ("a", "b"):
        paths = [tmp_path / f"{side}-{run}.jsonl" for side in ("train", "heldout")]
        stats = build_corpus(*paths, RECIPE, library)
        runs.append([path.read_bytes() for path in paths])
    assert runs[0] == runs[1]
    ids = [[json.loads(line)["id"] for line in text.splitlines()] for text in runs[0]]
    train, heldout = ({name.split(":")[0] for name in side} for side in ids)
    assert not train & heldout
    assert train | heldout == {f"m{i}" for i in range(30)} | {"pkg"}
    assert all(is_heldout(name, 40) for name in heldout)
    assert (stats.files_skipped, stats.pairs_train) == (2, len(ids[0]))
    assert stats.modules_train == len(train)
    assert 5 < len(heldout) < 20  # 31 modules, 40 %: the hash does split


def test_hash_of_the_split_is_pinned():
    # Fault: a split that changes between versions would leak held-out modules into an old cache's
    # training side. `printf json.decoder | sha256sum` begins with 576bb4ff7b1a8f91, which is 41
    # modulo 100.
    assert not is_heldout("json.decoder", 41)
    assert is_heldout("json.decoder", 42)


def test_empty_side_is_an_error(tmp_path, library):
    # Fault: an empty held-out file that shows as a division by zero after training.
    import dataclasses

    with pytest.raises(UserError, match="held-out corpus"):
        build_corpus(
            tmp_path / "t", tmp_path / "h", dataclasses.replace(RECIPE, heldout_percent=0), library
        )
    assert not (tmp_path / "t").exists()
