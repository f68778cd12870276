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


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """A random small SmolVLA whose normalised actions are environment actions."""
    import torch

    from vla_wmrl.policies import nano

    torch.manual_seed(0)
    spec = nano.NanoSpec(
        image_size=32, vision_width=24, vision_layers=1, vision_heads=2, width=48, layers=2, heads=2, kv_heads=1,
        denoising_steps=4,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("policy")
    stats = {
        "observation.state": {"mean": torch.zeros(8), "std": torch.ones(8)},
        "action": {"mean": torch.zeros(7), "std": torch.full((7,), 0.3)},
    }
    nano.build_policy(folder, spec, ["put both the alphabet soup and the tomato sauce in the basket"], stats)
    return folder
