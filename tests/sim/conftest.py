"""Real LIBERO-Long task 0, built once per test session; a small random policy."""

import pytest
import torch

from sim.libero import EnvSpec, LiberoEnv

SPEC = EnvSpec(task_id=0, image_size=32, stepping="fast", lod_mm=8.0, multisample=0)


@pytest.fixture(scope="session")
def env():
    made = LiberoEnv(SPEC)
    yield made
    made.close()


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """A random small SmolVLA whose normalised actions are environment actions."""
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
