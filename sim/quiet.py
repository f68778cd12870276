"""Import lerobot's data sets without pages of warnings about a video decoder that nothing here uses."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_lerobot() -> Iterator[None]:
    """Inside the block, and for progress bars of `datasets` from then on, only errors are shown."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        import datasets

        datasets.disable_progress_bars()
    logging.disable(before)
