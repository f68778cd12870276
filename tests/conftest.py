"""Shared set-up: no hub, one thread, the renderer chosen before anything imports mujoco."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("MPLBACKEND", "Agg")
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402

from sim.gl import setup_gl  # noqa: E402

setup_gl()


@pytest.fixture(autouse=True)
def seeds():
    """Tests that draw without a seed of their own still repeat."""
    import random

    import numpy as np

    random.seed(0)
    np.random.seed(0)
