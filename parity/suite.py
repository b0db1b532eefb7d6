"""`parity run`: the checks over all configurations, shared by worker processes.

A task is one configuration of one group of checks: XLA compiles a configuration once, in the
process that has it. Nothing is shared between tasks, so that a failure is one of its task alone.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import queue
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from parity.checks.base import CHECKS, PLACES, CheckResult, Finding, Plan, find_check
from parity.compiling import ONE_THREAD
from torch_port.cache import default_cache_root
from torch_port.data.parallel import end_with_parent
from torch_port.errors import UserError

WORKERS = 2
BATCHES = ("blocks", "losses", "gradients", "metrics", "acceptance")  # one evaluation for all
_PACKAGES = ("torch", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class Task:
    """One configuration of one check, or of the five that share their evaluations."""

    checks: tuple[str, ...]
    configuration: str | None  # None: all that the check has


@dataclass
class SuiteResult:
    """What a run found, by check, and what it was."""

    results: dict[str, CheckResult]
    quick: bool
    seed: int
    started: str
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether every check that ran agrees."""
        return all(result.agrees for result in self.results.values())

    @property
    def findings(self) -> list[Finding]:
        """Every disagreement, in the order of the checks."""
        return [finding for result in self.results.values() for finding in result.findings]

    def counts(self) -> tuple[int, int]:
        """Return (random cases, edges); a case that several checks look at counts once."""
        cases = edges = 0
        for group in _groups(tuple(self.results)):
            most = max((self.results[n] for n in group), key=lambda r: sum(r.cases.values()))
            edges += most.edges
            cases += sum(most.cases.values()) - most.edges
        return cases, edges

    @property
    def refused(self) -> int:
        """How many batches both sides refused, which leaves only their blocks to compare."""
        return max((result.refused for result in self.results.values()), default=0)


Progress = Callable[[int, int, str], None]


def run_suite(
    plan: Plan,
    names: Sequence[str] = CHECKS,
    workers: int = WORKERS,
    progress: Progress = lambda done, total, what: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> SuiteResult:
    """Run checks in worker processes; with no worker, here.

    Arguments: the plan (its own `progress` is not called); the checks by name; `progress(done,
    total, what)`, random cases and the tasks that are done; `on_finding` as soon as one is known.
    Raises UserError when a worker dies.
    """
    started = time.monotonic()
    suite = SuiteResult(
        {name: CheckResult(name) for name in CHECKS if name in names},
        plan.quick,
        plan.seed,
        datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_versions(),
    )
    for found in _run_tasks(tasks(plan, names), plan, workers, progress):
        for name, result in found.items():
            suite.results[name].add(result)
            for finding in result.findings[:1]:
                on_finding(finding)
    _in_order(suite, [task.configuration for task in tasks(plan, names)])
    suite.seconds = time.monotonic() - started
    return suite


def _in_order(suite: SuiteResult, names: list[str | None]) -> None:
    """Sort configurations as they are listed: workers finish in any order."""
    place = {name: number for number, name in reversed(list(enumerate(names)))}
    for result in suite.results.values():
        result.cases = dict(sorted(result.cases.items(), key=lambda item: place.get(item[0], 0)))
        result.findings.sort(key=lambda found: place.get(found.configuration, 0))


def tasks(plan: Plan, names: Sequence[str]) -> list[Task]:
    """Return what there is to do, the longest first."""
    found = []
    for group in _groups(names):
        for configuration in _configurations(group[0], plan):
            if configuration is None or plan.wants(configuration):
                found.append(Task(group, configuration))
    first = ("training", "checkpoints", "precision", "decoding")
    return sorted(found, key=lambda task: task.checks[0] not in first)


def _groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    shared = tuple(name for name in BATCHES if name in names)
    rest = [(name,) for name in CHECKS if name in names and name not in BATCHES]
    return [*([shared] if shared else []), *rest]


def _configurations(check: str, plan: Plan) -> list[str | None]:
    if check in BATCHES:
        from parity.configurations import chosen_configurations

        return [c.name for c in chosen_configurations(plan.quick, plan.configurations)]
    if check == "decoding":
        from parity.checks.decoding import KINDS

        return list(KINDS)
    if check == "training":
        from parity.checks.training import MASTERS_RUN, RANKS_RUN, RUNS

        return [*RUNS, MASTERS_RUN, RANKS_RUN]
    if check == "precision":
        from parity.checks.precision import ROUNDING_RUN, chosen

        return [*chosen(plan), ROUNDING_RUN]
    return [None]


def expected_cases(task: Task, plan: Plan) -> int:
    """Return how many random cases a task counts, if nothing disagrees."""
    if task.checks[0] in ("training", "checkpoints"):
        return 1
    module: Any = import_module(PLACES[task.checks[0]][0])
    each = plan.count(module.QUICK, module.WHOLE)
    return each * (len(module.KINDS) if task.configuration is None else 1)


def run_task(task: Task, plan: Plan) -> dict[str, CheckResult]:
    """Run one task; a check that breaks off is a disagreement of its own."""
    if task.configuration is not None:
        plan = replace(plan, configurations=(task.configuration,))
    try:
        if task.checks[0] in BATCHES:
            from parity.checks.batches import run_batches

            return run_batches(plan, task.checks)
        return {name: find_check(name).run(plan) for name in task.checks}
    except Exception as error:  # noqa: BLE001 (the other tasks' results must not be lost)
        where = task.configuration or "all"
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        return {
            name: CheckResult(
                name,
                findings=[Finding(name, where, "the check broke off", float("inf"), 0.0, text)],
            )
            for name in task.checks
        }


# --- Worker processes -------------------------------------------------------------------------

_channel: Any = None  # in a worker: where its cases are counted


def worker_environment() -> dict[str, str]:
    """Return what a worker's environment must say before torch and jax are imported.

    One thread each; XLA compiles fast, and what was compiled is kept for the next run.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": ONE_THREAD,
        "JAX_COMPILATION_CACHE_DIR": str(default_cache_root() / "parity-xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _run_tasks(
    todo: list[Task], plan: Plan, workers: int, progress: Progress
) -> Iterator[dict[str, CheckResult]]:
    if workers == 0:
        for number, task in enumerate(todo, start=1):
            yield run_task(task, plan)
            progress(number, len(todo), f"{task.checks[0]} {task.configuration or ''}")
        return
    context = multiprocessing.get_context("spawn")
    channel = context.Queue()
    before = {name: os.environ.get(name) for name in worker_environment()}
    for name, value in worker_environment().items():
        os.environ.setdefault(name, value)
    try:
        with ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin, initargs=(channel,)
        ) as pool:
            quiet = replace(plan, progress=_count)
            waiting = {pool.submit(run_task, task, quiet) for task in todo}
            cases = sum(expected_cases(task, plan) for task in todo)
            yield from _collect(waiting, cases, channel, progress)
    except BrokenProcessPool:
        raise UserError(
            "a worker process of the suite died, perhaps for want of memory (each takes 3 GB); "
            "try --workers 1"
        ) from None
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)


def _collect(
    waiting: set[Future[dict[str, CheckResult]]], expected: int, channel: Any, progress: Progress
) -> Iterator[dict[str, CheckResult]]:
    """Yield what the workers return, counting their cases meanwhile."""
    total, cases = len(waiting), 0
    try:
        while waiting:
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            try:
                while True:
                    cases += channel.get_nowait()
            except queue.Empty:
                pass
            progress(cases, expected, f"{total - len(waiting)} of {total} tasks")
    finally:
        for future in waiting:
            future.cancel()


def _begin(channel: Any) -> None:
    global _channel
    _channel = channel
    end_with_parent()
    # The workers share XLA's cache: one may find an entry that the other is still writing, and
    # compiles it itself.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    import torch

    torch.set_num_threads(1)


def _count(done: int, total: int) -> None:
    if _channel is not None:
        _channel.put(1)


def _versions() -> dict[str, str]:
    found = {"jaxdraft": version("jaxdraft"), "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    return found
