"""The sandbox's boxes on Ray: on this machine, or on many that share nothing. Each machine needs bubblewrap.

Same jobs and same results as `sandbox.Sandbox`; only the boxes live in actors. The tasks' public files go through Ray's object
store, once; hidden answers never leave the driver, which grades."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from text_agents.autoresearch.sandbox import GRACE_S, PRELOAD, START_S, Limits, Result, Sandbox, Worker
from vla_wmrl.errors import UserError, require

CONNECT = {"log_to_driver": False, "logging_level": "error"}
Files = Mapping[str, Mapping[str, bytes]]  # task -> path -> content


def packed(public: Mapping[str, Path]) -> dict[str, dict[str, bytes]]:
    """The tasks' public folders as bytes."""
    return {
        name: {str(p.relative_to(root)): p.read_bytes() for p in sorted(Path(root).rglob("*")) if p.is_file()}
        for name, root in public.items()
    }


class Host:
    """One actor: a box and the files that it shows its programs."""

    def __init__(self, number: int, files: Files, limits: Limits, preload: Sequence[str]):
        self.folder = tempfile.TemporaryDirectory(prefix="vla_wmrl_tasks_")
        os.chmod(self.folder.name, 0o755)  # the programs' users have to get through
        public = {name: Path(self.folder.name) / name for name in files}
        for name, content in files.items():
            for path, data in content.items():
                file = public[name] / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        self.worker = Worker(number, public, limits, preload)

    def run(self, task: str, code: str) -> Result | None:
        return self.worker.run(task, code)

    def close(self) -> None:
        self.worker.close()
        self.folder.cleanup()


class RemoteWorker:
    """A box on another machine, made anew after its actor or its machine was lost."""

    def __init__(self, number: int, files: ray.ObjectRef, limits: Limits, preload: Sequence[str]):
        self.number, self.files, self.limits, self.preload = number, files, limits, tuple(preload)
        self.actor: Any = None
        self.last_words = ""

    def run(self, task: str, code: str) -> Result | None:
        """None where nobody ran the program. Raises UserError where that machine cannot make a box."""
        if self.actor is None:
            options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
            self.actor = ray.remote(Host).options(**options).remote(self.number, self.files, self.limits, self.preload)
        try:
            return ray.get(self.actor.run.remote(task, code), timeout=START_S + self.limits.wall_s + 2 * GRACE_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise
        except ray.exceptions.RayError as error:  # the actor, its machine, or the answer is lost
            self.last_words = " ".join(str(error).split())[:500]
            self._end()
            return None

    def close(self) -> None:
        if self.actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # it is ended all the same
                ray.get(self.actor.close.remote(), timeout=GRACE_S)
            self._end()

    def _end(self) -> None:
        ray.kill(self.actor)
        self.actor = None


@dataclass
class RaySandbox(Sandbox):
    """A pool of boxes in actors. address: of a cluster, "auto" for the one this machine is in, None for Ray alone here.

    Uses the Ray that the process is connected to, if there is one. Raises UserError when no cluster answers at `address`, or
    it has fewer CPUs than workers.
    """

    preload: Sequence[str] = PRELOAD
    address: str | None = None

    def _make_workers(self) -> list[RemoteWorker]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use over the network
        self.ours = not ray.is_initialized()
        if self.ours:
            self._connect()
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if self.workers > cpus:
            self._leave()
        require(self.workers <= cpus, f"sandbox.workers={self.workers}, but Ray has {cpus} CPUs: a box takes one")
        files = ray.put(packed(self.public))
        return [RemoteWorker(i, files, self.limits, self.preload) for i in range(self.workers)]

    def _connect(self) -> None:
        host, _, port = (self.address or "").removeprefix("ray://").rpartition(":")
        if host and port.isdigit():  # Ray itself would try for many minutes
            try:
                socket.create_connection((host, int(port)), 10).close()
            except OSError as error:
                raise UserError(f"Ray does not answer at sandbox.ray_address={self.address} ({error})") from error
        try:
            if self.address is None:
                ray.init("local", num_cpus=self.workers, include_dashboard=False, **CONNECT)
            else:
                ray.init(self.address, **CONNECT)
        except Exception as error:  # Ray has no class of its own for this; a cluster that is not there is a ConnectionError
            first = (str(error) or type(error).__name__).splitlines()[0]
            where = "does not start here" if self.address is None else f"does not answer at sandbox.ray_address={self.address}"
            raise UserError(f"Ray {where} ({first})") from error

    def _leave(self) -> None:
        if self.ours:
            ray.shutdown()
            self.ours = False

    def close(self) -> None:
        super().close()
        self._leave()
