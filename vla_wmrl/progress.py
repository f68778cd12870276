"""Progress for people: a bar with ETA on a terminal, plain lines elsewhere (at least one every 20 s)."""

from __future__ import annotations

import sys
import threading
import time
from typing import ClassVar, TextIO

LINE_EVERY_S = 20.0


def clock(seconds: float) -> str:
    """Seconds as "45 s", "3m 20s" or "1h 05m"."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"


class Progress:
    """Progress of `total` units of work under `label`; bars nest. Use as a context manager; `note` is shown behind.

    `done`: units that a run before this one did; they count as done, not towards the speed.
    """

    _live: ClassVar = None  # the one live display of rich that all bars of the process share
    _users: ClassVar[int] = 0

    def __init__(self, total: int, label: str, stream: TextIO | None = None, every_s: float = LINE_EVERY_S, done: int = 0):
        self.total, self.label, self.done, self.note = total, label, done, ""
        self._before = done
        self._stream = sys.stderr if stream is None else stream
        self._every_s = every_s
        self._bar = None

    def __enter__(self) -> Progress:
        self._start = self._printed = time.monotonic()
        if self._stream.isatty():
            self._open_bar()
        else:
            self._print()
            self._ended = threading.Event()
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()
        return self

    def update(self, n: int = 1, note: str = "") -> None:
        self.done += n
        self.note = note or self.note
        if self._bar is not None:
            Progress._live.update(self._bar, completed=self.done, note=self.note)
        elif time.monotonic() - self._printed >= self._every_s:
            self._print()

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            Progress._live.remove_task(self._bar)
            Progress._users -= 1
            if Progress._users == 0:
                Progress._live.stop()
                Progress._live = None
        else:
            self._ended.set()
            self._ticker.join()
        self._print()

    def line(self) -> str:
        """The state as text: "label 3/10 (30%), 12 s, ETA 28 s, note"."""
        spent = time.monotonic() - self._start
        share = self.done / self.total if self.total else 1.0
        parts = [f"{self.label} {self.done}/{self.total} ({share:.0%}), {clock(spent)}"]
        if self._before < self.done < self.total:
            parts.append(f"ETA {clock(spent * (self.total - self.done) / (self.done - self._before))}")
        return ", ".join([*parts, *([self.note] if self.note else [])])

    def _print(self) -> None:
        self._printed = time.monotonic()
        print(self.line(), file=self._stream, flush=True)

    def _tick(self) -> None:
        while not self._ended.wait(max(0.01, self._printed + self._every_s - time.monotonic())):
            if time.monotonic() - self._printed >= self._every_s:
                self._print()

    def _open_bar(self) -> None:
        from rich import progress
        from rich.console import Console

        if Progress._live is None:
            columns = [progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()]
            columns += [progress.TimeElapsedColumn(), progress.TextColumn("ETA"), progress.TimeRemainingColumn()]
            Progress._live = progress.Progress(
                *columns, progress.TextColumn("{task.fields[note]}"), console=Console(file=self._stream)
            )
            Progress._live.start()
        Progress._users += 1
        self._bar = Progress._live.add_task(self.label, total=self.total, completed=self.done, note="")
