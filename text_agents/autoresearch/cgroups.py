"""Control groups where this process may make them: a bound on memory and on processes that root cannot exceed either.

Version 1 (one hierarchy a controller) and version 2 (one for all). Where they are read-only the sandbox still has
rlimits, and says which bounds are missing."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()


class Cgroup:
    """One group a box. `bounds`: which of "memory" and "processes" it enforces. Close it when they have ended."""

    def __init__(self, memory_mb: int, processes: int):
        name = f"vla_wmrl-{os.getpid()}-{next(_numbers)}"
        self.folders: list[Path] = []
        self.bounds: set[str] = set()
        memory = str(memory_mb << 20)
        if (ROOT / "cgroup.controllers").is_file():
            folder = self._make(ROOT / _own(""), name)
            if folder:
                self._bound("memory", folder / "memory.max", memory)
                self._bound("processes", folder / "pids.max", str(processes))
                with contextlib.suppress(OSError):
                    (folder / "memory.swap.max").write_text("0")
        else:
            folder = self._make(ROOT / "memory" / _own("memory"), name)
            if folder:
                self._bound("memory", folder / "memory.limit_in_bytes", memory)
            folder = self._make(ROOT / "pids" / _own("pids"), name)
            if folder:
                self._bound("processes", folder / "pids.max", str(processes))

    def _make(self, parent: Path, name: str) -> Path | None:
        try:
            (parent / name).mkdir()
        except OSError:
            return None
        self.folders.append(parent / name)
        return parent / name

    def _bound(self, what: str, path: Path, value: str) -> None:
        with contextlib.suppress(OSError):
            if path.exists():
                path.write_text(value)
                self.bounds.add(what)

    def enter(self) -> None:
        """Move the calling process in (between fork and exec)."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                (folder / "cgroup.procs").write_text("0")

    def out_of_memory_kills(self) -> int:
        """Processes the kernel has ended here for lack of memory."""
        for folder in self.folders:
            for file in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError, ValueError):
                    for line in (folder / file).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0

    def close(self) -> None:
        for folder in self.folders:
            for _ in range(500):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:  # a process is still ending
                    time.sleep(0.02)


def _own(controller: str) -> str:
    """This process's group in the hierarchy of `controller` ("" for version 2), relative to its mount."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path.lstrip("/")
    return ""
