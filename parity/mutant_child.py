"""The process of one mutant: inject the fault on import, run the checks until one disagrees.

Started by `parity.mutants` as `python -m parity.mutant_child`. It imports the packages that both
sides stand on, and neither side. Then it reads mutants from stdin, one line of JSON each, forks a
process for each, which imports the two sides with the fault in place, and prints the verdict, one
line of JSON. Forking saves what importing torch and jax costs; neither has started a thread yet.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import types
from collections.abc import Sequence
from typing import Any

from parity.checks.base import CHECKS, Finding, Plan, find_check
from parity.mutant_catalogue import Mutant, StaleError, mutate

# The seed of the drawn cases: a mutant's verdict must not change from one run to the next.
SEED = 0
TIMEOUT = 900  # s: a fault may make a loop endless
# Imported before the forks: nothing of this project's.
_COMMON = (
    "numpy",
    "torch",
    "jax",
    "flax.linen",
    "optax",
    "pydantic",
    "safetensors.numpy",
    "rich",
    "hypothesis",
)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source with the fault in it; no bytecode is read or written."""

    def __init__(self, injector: Injector, path: str) -> None:
        super().__init__(injector.mutant.module, path)
        self._injector = injector

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        try:
            source = mutate(self._injector.mutant, self.get_data(path).decode("utf-8"))
        except StaleError as error:
            self._injector.stale = str(error)  # a check may take the exception for a disagreement
            raise
        self._injector.injected = True
        return compile(source, path, "exec", dont_inherit=True)


class Injector(importlib.abc.MetaPathFinder):
    """Finds the mutant's module before Python's own finders do; `injected` says that it came."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.injected = mutant, False
        self.stale: str | None = None

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec with our loader, None for every other module."""
        if fullname != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _Loader(self, spec.origin)
        return spec


def inject(mutant: Mutant) -> Injector:
    """Put the fault in place for the rest of the process.

    Raises RuntimeError when the module has been imported already: nothing would be injected.
    """
    if mutant.module in sys.modules:
        raise RuntimeError(f"{mutant.module} was imported before the fault could be injected")
    injector = Injector(mutant)
    sys.meta_path.insert(0, injector)
    return injector


def examine(mutant: Mutant, others: bool, injector: Injector) -> dict[str, Any]:
    """Run checks one by one until one disagrees.

    Returns what `mutants.json` says of the mutant: `detected_by` (None for a survivor), `finding`,
    the checks that `ran`, and the ones that could not run with the reason (`broken`).
    """
    narrow = Plan(seed=SEED, configurations=mutant.configurations or None, first_only=True)
    wide = Plan(seed=SEED, first_only=True)
    # What its own checks do not see where it matters, all of them look for everywhere.
    runs = [(name, narrow) for name in mutant.checks]
    runs += [(name, wide) for name in CHECKS] if others else []
    ran, broken = list[str](), dict[str, str]()
    finding: Finding | None = None
    for name, plan in runs:
        try:
            result = find_check(name).run(plan)
        except Exception as error:  # noqa: BLE001 (a check that breaks off saw no disagreement)
            broken[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            continue
        ran.append(name)
        if result.findings:
            finding = result.findings[0]
            break
    if injector.stale is not None:
        return {"error": injector.stale}
    return {
        "detected_by": None if finding is None else finding.check,
        "finding": None if finding is None else _told(finding),
        "ran": ran,
        "broken": broken,
        "injected": injector.injected,
    }


def _told(finding: Finding) -> str:
    return f"{finding.configuration}: {finding.stage}: {finding.text}"[:400]


def _answer(line: str) -> dict[str, Any]:
    asked = json.loads(line)
    # Lists of JSON; the dataclass has tuples.
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in asked["mutant"].items()
    }
    mutant = Mutant(**fields)
    try:
        return examine(mutant, asked["others"], inject(mutant))
    except Exception as error:  # noqa: BLE001 (said in the verdict)
        return {"error": f"{type(error).__name__}: {error}"}


def _in_fork(line: str) -> str:
    """Answer in a forked process, killed after TIMEOUT; return its line of JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(2, 1)  # what a package prints must not stand among the verdicts
            signal.alarm(TIMEOUT)
            os.write(writer, json.dumps(_answer(line)).encode())
            status = 0
        finally:
            # Clean-up of torch's and XLA's threads can hang; all is said.
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    _, status, usage = os.wait4(child, 0)
    verdict = json.loads(said) if said else {"error": f"no verdict: {_ending(status)}"}
    return json.dumps(verdict | {"cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2)})


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return f"no answer within {TIMEOUT} s"
    return f"the process ended with status {os.waitstatus_to_exitcode(status)}"


def main() -> None:
    """Answer the mutants of stdin one after another."""
    for name in _COMMON:
        importlib.import_module(name)
    for line in sys.stdin:
        print(_in_fork(line), flush=True)


if __name__ == "__main__":
    main()
