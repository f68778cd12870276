"""A pool of simulator processes: lazily built, with time limits, the worker's own traceback, and bounded rebuilds.

Processes are spawned, never forked (a GL context does not survive a fork). A job is any picklable object with
`run(context)`; its `affinity` names what it needs built, so that a worker gets jobs for simulators it already has.
Results do not depend on the number of workers, since a job depends on nothing but itself. sim.ray_pool is the same pool
with other workers: it overrides how one is started, asked, heard and ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from vla_wmrl.errors import UserError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")  # the last: software rendering


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes that are started inside keep to one core: children read these variables when they import their libraries."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Job(Protocol):
    affinity: tuple

    def run(self, context: Context) -> Any: ...


class WorkerError(RuntimeError):
    """A job failed. The message has the worker's id, the job and the traceback of the worker itself."""


class WorkerTimeout(WorkerError):
    """A worker was silent for longer than `timeout_s` more often than the pool may rebuild."""


@dataclass
class Context:
    """What a worker process keeps between jobs, by the key that built it."""

    worker: int
    kept: dict[tuple, Any] = field(default_factory=dict)

    def keep(self, key: tuple, build: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = build()
        return self.kept[key]


Answer = tuple[int, Any, str | None]  # index of the job, its result (or the user's mistake), traceback of a failure


def answer(index: int, job: Job, context: Context) -> Answer:
    """Runs `job` in a worker. Raises KeyboardInterrupt only."""
    try:
        return index, job.run(context), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return index, error if isinstance(error, UserError) else None, traceback.format_exc()


def _end_with_parent() -> None:
    """No orphan stays, whatever hangs in this process, when the parent is killed and cannot end it."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _serve(worker: int, pipe: Connection) -> None:
    """The worker's main loop."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = Context(worker)
    while True:
        try:
            index, job = pipe.recv()
            pipe.send(answer(index, job, context))
        except (EOFError, KeyboardInterrupt):
            return


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    built: set = field(default_factory=set)
    job: int | None = None
    since: float = 0.0


class Pool:
    """`n` worker processes. Use as a context manager, or close()."""

    _queue: ThreadPoolExecutor | None = None  # made by the first `submit`

    def __init__(self, n: int, timeout_s: float = 300.0, rebuilds: int = 3):
        self.n, self.timeout_s, self.rebuilds_left = n, timeout_s, rebuilds
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: dict[int, _Worker] = {}

    def _start(self, worker: int) -> _Worker:
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=_serve, args=(worker, theirs), daemon=True, name=f"simulator-{worker}")
        with one_thread_each():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _send(self, worker: _Worker, index: int, job: Job) -> None:
        with suppress(ConnectionError):  # it died while it had nothing to do: _answers says so
            worker.pipe.send((index, job))

    def _answers(self, wait_s: float) -> Iterator[tuple[int, Answer | str]]:
        """What busy workers have to say, waiting for it at most `wait_s`: an answer each, or how the worker was lost."""
        busy = {w.pipe: name for name, w in self._workers.items() if w.job is not None}
        for pipe in wait(list(busy), timeout=wait_s):
            name = busy[pipe]
            try:
                said = pipe.recv()
            except (EOFError, ConnectionError):
                process = self._workers[name].process
                process.join(timeout=5.0)  # its pipe closes a moment before it has an exit code
                killed = process.exitcode == -signal.SIGKILL  # how Linux ends a process when memory runs out
                said = f"died (exit code {process.exitcode}{'; out of memory?' if killed else ''})"
            yield name, said

    def _end(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()

    def _rebuild(self, worker: int, jobs: Sequence[Job], why: str) -> None:
        dead = self._workers.pop(worker)
        self._end(dead)
        job = "" if dead.job is None else f" while running {jobs[dead.job]!r:.200}"
        if self.rebuilds_left == 0:
            self.close()
            kind = WorkerTimeout if why.startswith("silent") else WorkerError
            raise kind(f"worker {worker} {why}{job}; no rebuilds left")
        self.rebuilds_left -= 1
        self._workers[worker] = self._start(worker)

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Any]]:
        """Runs all `jobs`; yields (index, result) as they finish. A job lost with its worker runs again in a new one."""
        jobs = list(jobs)
        waiting = list(range(len(jobs)))
        for worker in range(min(self.n, len(jobs))):
            if worker not in self._workers:
                self._workers[worker] = self._start(worker)
        done = 0
        while done < len(jobs):
            for worker in self._workers.values():
                if worker.job is None and waiting:
                    index = next((i for i in waiting if jobs[i].affinity in worker.built), waiting[0])
                    waiting.remove(index)
                    worker.job, worker.since = index, time.monotonic()
                    worker.built.add(jobs[index].affinity)
                    self._send(worker, index, jobs[index])
            for name, said in self._answers(min(1.0, self.timeout_s / 4)):
                worker = self._workers[name]
                if isinstance(said, str):
                    waiting.insert(0, worker.job)
                    self._rebuild(name, jobs, said)
                    continue
                index, result, failure = said
                worker.job = None
                if failure is not None:
                    self.close()
                    if isinstance(result, UserError):
                        raise result
                    raise WorkerError(f"worker {name} failed on {jobs[index]!r:.200}\n{failure}")
                done += 1
                yield index, result
            for name, worker in list(self._workers.items()):
                if worker.job is not None and time.monotonic() - worker.since > self.timeout_s:
                    waiting.insert(0, worker.job)
                    self._rebuild(name, jobs, f"silent for {self.timeout_s:g} s")

    def map(self, jobs: Sequence[Job]) -> list[Any]:
        """All results, in the order of `jobs`."""
        results = dict(self.run(jobs))
        return [results[i] for i in range(len(jobs))]

    def submit(self, jobs: Sequence[Job], then: Callable[[list[Any]], Any] = lambda results: results) -> Future:
        """`then` of `map` in the background. What was submitted earlier runs first, so that jobs never share the workers."""
        if self._queue is None:
            self._queue = ThreadPoolExecutor(1)
        return self._queue.submit(lambda: then(self.map(jobs)))

    def close(self) -> None:
        if self._queue is not None:
            self._queue.shutdown(wait=False, cancel_futures=True)
            self._queue = None
        for worker in self._workers.values():
            self._end(worker)
        self._workers.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
