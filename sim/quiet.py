"""Keep lerobot from printing pages about a video decoder that nothing here uses."""

from __future__ import annotations

import logging


def quiet_lerobot() -> None:
    """Only errors from lerobot's probe of torchcodec, and no progress bar for every episode written."""
    import datasets

    logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
