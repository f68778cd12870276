import dataclasses
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors

from vla_wmrl.policies import checkpoint_io, nano
from vla_wmrl.policies.flow import FlowPolicy

TASKS = ("put both moka pots on the stove", "pick up the book and place it in the back compartment of the caddy")
torch.set_num_threads(1)
SMALL = nano.NanoSpec(
    image_size=32, vision_width=24, vision_layers=1, vision_heads=2, width=48, layers=2, heads=2, kv_heads=1,
    denoising_steps=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small random checkpoint whose action and state dims are padded (9 and 10), as real SmolVLA's are (32)."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    vlm = folder / checkpoint_io.VLM_FOLDER
    nano.build_vlm(vlm, SMALL, TASKS)
    config = dataclasses.replace(nano.policy_config(vlm, SMALL), max_action_dim=9, max_state_dim=10)
    stats = {
        "observation.state": {"mean": torch.randn(8) * 0.1, "std": torch.rand(8) + 0.2},
        "action": {"mean": torch.randn(7) * 0.1, "std": torch.rand(7) * 0.2 + 0.2},
    }
    checkpoint_io.save(folder, SmolVLAPolicy(config), *make_smolvla_pre_post_processors(config, stats))
    return folder


@pytest.fixture
def make_flow(checkpoint):
    def make(eta=0.5, sde="hybrid", **rest):
        return FlowPolicy.from_pretrained(checkpoint, eta=eta, sde=sde, **rest)

    return make


@pytest.fixture
def observation():
    def make(rows, seed=0):
        g = torch.Generator().manual_seed(seed)
        names = ("observation.images.image", "observation.images.image2")
        images = {n: torch.randint(0, 256, (rows, 32, 32, 3), dtype=torch.uint8, generator=g) for n in names}
        return images, torch.randn(rows, 8, generator=g), [TASKS[i % 2] for i in range(rows)]

    return make


@pytest.fixture
def keys():
    return lambda rows: [(7, 0, 3, i, 1) for i in range(rows)]
