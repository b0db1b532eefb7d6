"""What holds for the project as a whole: the dependency rule, and README and CI saying the same."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
FORBIDDEN = {
    "jaxdraft": {"torch", "transformers", "torch_port", "parity"},
    "torch_port": JAX | {"jaxdraft", "parity"},
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_neither_package_imports_the_other(package: str) -> None:
    """Fault: a helper shared across the cross-check, also inside a function."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found = {name.split(".")[0] for name in names} & FORBIDDEN[package]
            assert not found, f"{file} imports {found}"


@pytest.mark.parametrize(
    ("package", "absent"),
    [("torch_port", sorted(JAX)), ("jaxdraft", ["torch", "transformers"])],
)
def test_every_module_imports_without_the_other_side(package: str, absent: list[str]) -> None:
    """Fault: an Ascend node has no jax, and a JAX user no torch."""
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / package).rglob("*.py"))
        if file.stem != "__main__"
    ]
    code = "import sys, importlib\n"
    code += f"sys.modules.update(dict.fromkeys({absent!r}))\n"
    code += f"for name in {modules!r}: importlib.import_module(name)\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_ci_runs_the_readmes_test_command() -> None:
    """Fault: a CI that passes while the README's command does not."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (pip install .*)$", readme, flags=re.MULTILINE)
    assert commands == [
        'pip install -e ".[all]" && torch-port demo',
        'pip install -e ".[all]" && pytest',
    ]
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_readmes_links_and_map_are_true() -> None:
    """Fault: a map of yesterday's packages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", readme):
        assert (ROOT / target).exists(), target
    folders = set(re.findall(r"^\| `([\w/]+)/`", readme, flags=re.MULTILINE))
    for package in ("jaxdraft", "torch_port", "parity"):
        with_code = {str(file.parent.relative_to(ROOT)) for file in (ROOT / package).rglob("*.py")}
        assert with_code - folders <= {"parity/checks"}  # shown with parity/
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_every_dependency_has_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = project["dependencies"] + extras["spec"] + extras["test"]
    assert all("<" in requirement for requirement in listed)
    assert extras["npu"] == ["torch_npu==2.13.0"]
