"""`parity mutants`: faults injected one at a time, each in a process of its own.

Nothing on disk changes: the fault is put into a module's source as it is imported
(`mutant_child`). The parent starts the processes, a few at a time, and collects verdicts.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parity.compiling import ONE_THREAD
from parity.mutant_catalogue import ROOT, Mutant
from torch_port.cache import default_cache_root


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: which check saw it (None: it survived), and how."""

    mutant: Mutant
    detected_by: str | None
    finding: str | None
    note: str | None  # of a survivor: what else happened
    seconds: float
    cpu_seconds: float  # a busy machine lengthens the others

    def entry(self) -> dict[str, Any]:
        """Return the mutant's entry in mutants.json."""
        return {
            "name": self.mutant.name,
            "side": self.mutant.side,
            "clause": self.mutant.clause,
            "what": self.mutant.what,
            "detected_by": self.detected_by,
            "finding": self.finding,
            "note": self.note,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
        }


class Worker:
    """A child process that answers one mutant after another, each in a fork of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def ask(self, mutant: Mutant, others: bool) -> dict[str, Any]:
        """Return what the child says of a mutant; `error` alone when it says nothing.

        A child that is gone then is started anew for the next mutant.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"mutant": asdict(mutant), "others": others}) + "\n")
            process.stdin.flush()
            said: dict[str, Any] = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            self._end()
            return {"error": f"no verdict: the worker ended with status {process.returncode}"}
        return said

    def stop(self) -> None:
        """End the child and the fork that it waits for; nothing is started any more."""
        self._stopped = True
        self._end()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            if self._stopped:
                raise RuntimeError("the run was stopped")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "parity.mutant_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=child_environment(),
                start_new_session=True,  # so that its forks end with it
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()


def child_environment() -> dict[str, str]:
    """Return the environment of a child: our sources first, one thread, compilations kept.

    With JAX's persistent cache a fault of the port never makes the specification compile again; a
    fault of the specification changes its program, and with it the key.
    """
    environment = dict(os.environ)
    path = environment.get("PYTHONPATH")
    environment |= {
        "PYTHONPATH": str(ROOT) if not path else f"{ROOT}{os.pathsep}{path}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": ONE_THREAD,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(default_cache_root() / "parity-xla"))
    return environment


def run_mutants(
    mutants: Sequence[Mutant],
    jobs: int,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    others: bool = True,
) -> list[Verdict]:
    """Examine every mutant, `jobs` at a time; verdicts in the order of the mutants.

    Without `others` only a mutant's own checks run, not the whole suite after them.
    """
    workers = [Worker() for _ in range(min(jobs, len(mutants)))]
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def examined(mutant: Mutant) -> Verdict:
        worker = free.get()
        try:
            return _verdict(mutant, worker, others)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(len(workers) or 1)
    try:
        futures = {pool.submit(examined, mutant): mutant for mutant in mutants}
        for future in as_completed(futures):
            on_verdict(future.result())
        found = {mutant.name: future.result() for future, mutant in futures.items()}
    finally:
        # Workers first: a thread that waits for one's answer would hold up the pool.
        for worker in workers:
            worker.stop()
        pool.shutdown(cancel_futures=True)
    return [found[mutant.name] for mutant in mutants]


def _verdict(mutant: Mutant, worker: Worker, others: bool) -> Verdict:
    started = time.perf_counter()
    said = worker.ask(mutant, others)
    seconds = round(time.perf_counter() - started, 2)
    cpu_seconds = said.get("cpu_seconds", 0.0)
    if "error" in said:
        return Verdict(mutant, None, None, str(said["error"]), seconds, cpu_seconds)
    detected, finding = said["detected_by"], said["finding"]
    return Verdict(mutant, detected, finding, _note(said), seconds, cpu_seconds)


def _note(said: dict[str, Any]) -> str | None:
    """Say of a verdict what its check does not: checks that broke off, a fault never injected."""
    parts = [f"{name} broke off: {text}" for name, text in said["broken"].items()]
    if not said["injected"]:
        parts.append("no check imported the module")
    if said["detected_by"] is None:
        parts.append(f"ran {', '.join(said['ran']) or 'nothing'}")
    return "; ".join(parts) or None


def write_report(directory: Path, verdicts: Sequence[Verdict]) -> Path:
    """Write mutants.json; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "mutants.json"
    entries = [verdict.entry() for verdict in verdicts]
    detected = sum(v.detected_by is not None for v in verdicts)
    document = {"detected": detected, "mutants": len(entries), "entries": entries}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
