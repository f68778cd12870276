"""The worker pool on Ray: actors hold the simulators, on this machine or on many that share nothing.

Same jobs, same results and same bounds on lost workers as sim.workers.Pool; only the workers are actors. What a job reads
from the driver's disk (a policy's checkpoint and its newest weights) goes through Ray's object store, once a version.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import ray

from sim.workers import THREADS, Answer, Context, Job, Pool, WorkerError, answer
from vla_wmrl.errors import UserError

CONNECT = {"log_to_driver": False, "logging_level": "error"}


@dataclass(frozen=True)
class Parcel:
    """Files in Ray's object store: a folder, or one file. The name is their content's, so an actor knows what it has."""

    name: str
    files: ray.ObjectRef  # {path in the folder: bytes}; {"": bytes} for one file

    @classmethod
    def of(cls, path: str) -> Parcel:
        root = Path(path)
        files = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        files = files or {"": root.read_bytes()}
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
        return cls(digest.hexdigest()[:24], ray.put(files))

    def unpack(self, target: Path) -> None:
        for name, content in ray.get(self.files).items():
            file = target / name if name else target
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


class Simulators:
    """One actor: what sim.workers' process is, with a place of its own for the files that jobs read."""

    def __init__(self, worker: int, gpus: float):
        os.environ.update(dict.fromkeys(THREADS, "1"))  # read when a job imports torch, and when the renderer starts
        if gpus:  # the driver's choice of a renderer, if it came along, names a device of the driver
            for name in ("VLA_WMRL_GL", "MUJOCO_EGL_DEVICE_ID"):
                os.environ.pop(name, None)
        self.context = Context(worker)
        self.folder = Path(tempfile.gettempdir()) / f"vla_wmrl_actor_{os.getpid()}"

    def run(self, index: int, job: bytes, parcels: dict[str, Parcel]) -> bytes:
        """The pickled answer: as bytes, since arrays out of Ray's store cannot be written to and hold their place there."""
        wanted = pickle.loads(job)
        here = {path: str(self.folder / parcel.name) for path, parcel in parcels.items()}
        if parcels:
            wanted = replace(wanted, **{name: ref.at(here) for name, ref in _references(wanted).items()})
        reads = {path for ref in _references(wanted).values() for path in ref.reads(self.context)}
        for path, parcel in parcels.items():
            if here[path] in reads:
                parcel.unpack(Path(here[path]))
        try:
            return pickle.dumps(answer(index, wanted, self.context))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)  # read by now


@dataclass
class _Actor:
    handle: Any
    ref: ray.ObjectRef | None = None  # of the answer to come
    built: set = field(default_factory=set)
    job: int | None = None
    since: float = 0.0


class RayPool(Pool):
    """`n` actors (None: one a CPU). `address` of a cluster, "auto" for the one this machine is in, None for Ray alone here.

    Uses the Ray that the process is connected to, if there is one. Raises UserError when no cluster answers at `address`
    or it has fewer than `n` CPUs.
    """

    _open: ClassVar[int] = 0  # pools that use a Ray which one of them started
    _ours: ClassVar[bool] = False

    def __init__(
        self, n: int | None = None, timeout_s: float = 300.0, rebuilds: int = 3, address: str | None = None, gpus: float = 0.0
    ):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use over the network
        if not ray.is_initialized():
            self._connect(address, n or os.cpu_count() or 1)
            RayPool._ours = True
        RayPool._open += 1
        self.gpus, self._closed = gpus, False
        self._workers: dict[int, _Actor] = {}
        self._parcels: dict[str, tuple[int, Parcel]] = {}  # the newest version of every path
        cpus = int(ray.cluster_resources().get("CPU", 0))
        self.n, self.timeout_s, self.rebuilds_left = n or cpus, timeout_s, rebuilds
        if self.n > cpus:
            self.close()
            raise UserError(f"workers.n={self.n}, but Ray has {cpus} CPUs: an actor takes one")

    @staticmethod
    def _connect(address: str | None, cpus: int) -> None:
        if address is None:
            try:
                ray.init("local", num_cpus=cpus, include_dashboard=False, **CONNECT)
            except Exception as error:  # no class of its own; Ray's parts have 20 to 30 s to start
                first = (str(error) or type(error).__name__).splitlines()[0]
                raise UserError(f"Ray does not start here ({first}): free some CPU, or use --workers.pool=processes") from error
            return
        try:
            ray.init(address, **CONNECT)
        except ConnectionError as error:
            first = str(error).splitlines()[0]
            raise UserError(f"no Ray cluster at workers.ray_address={address}: start it with `ray start` ({first})") from None

    # ---- what differs from processes
    def _start(self, worker: int) -> _Actor:
        options = {"num_cpus": 1, "num_gpus": self.gpus, "max_restarts": 0, "max_task_retries": 0}
        return _Actor(ray.remote(Simulators).options(**options).remote(worker, self.gpus))

    def _send(self, worker: _Actor, index: int, job: Job) -> None:
        parcels = {path: self._parcels[path][1] for path in _paths(job)}
        worker.ref = worker.handle.run.remote(index, ray.cloudpickle.dumps(job), parcels)

    def _answers(self, wait_s: float) -> Iterator[tuple[int, Answer | str]]:
        busy = {w.ref: name for name, w in self._workers.items() if w.job is not None}
        if not busy:
            return
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=wait_s)
        for ref in ready:
            try:
                said = pickle.loads(ray.get(ref))
            except ray.exceptions.RayTaskError as error:  # outside of the job: code or files do not fit
                self.close()
                raise WorkerError(f"worker {busy[ref]} could not run its job\n{error}") from None
            except ray.exceptions.RayError as error:  # process, machine or result lost
                said = f"died ({' '.join(str(error).split())[:500]})"
            yield busy[ref], said

    def _end(self, worker: _Actor) -> None:
        ray.kill(worker.handle)

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Any]]:
        jobs = list(jobs)
        for job in jobs:
            for path, version in _paths(job).items():
                if self._parcels.get(path, (None,))[0] != version:
                    self._parcels[path] = (version, Parcel.of(path))
        yield from super().run(jobs)

    def close(self) -> None:
        """Ends the actors, and Ray too if a pool started it and no other pool is open."""
        if self._closed:
            return
        self._closed = True
        super().close()
        self._parcels.clear()
        RayPool._open -= 1
        if RayPool._ours and RayPool._open == 0:
            ray.shutdown()
            RayPool._ours = False


def _references(job: Job) -> dict[str, Any]:
    """The fields of `job` that stand for files of the driver: policies (sim.rollout) and world models (sim.imagine)."""
    return {name: value for name, value in vars(job).items() if hasattr(value, "paths")}


def _paths(job: Job) -> dict[str, int]:
    """What `job` reads from the driver's disk, with the version of each."""
    return {path: version for ref in _references(job).values() for path, version in ref.paths().items()}
