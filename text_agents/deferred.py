"""Work that waits until it is asked for: where one network serves two purposes, they take turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future


class Deferred(Future):
    """Work that is done when its result is asked for."""

    def __init__(self, work: Callable[[], object]):
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None):
        if not self.done():
            self.set_result(self._work())
        return super().result(timeout)
