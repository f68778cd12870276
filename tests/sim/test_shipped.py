"""What the repository ships fits its own code: weights of other dynamics would stop `make train` at its first line."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.episode_twins import episode_on_imagined_looks
from sim.libero import EnvSpec, LiberoEnv
from sim.rollout import begin, measure
from vla_wmrl.policies.flow import FlowPolicy
from vla_wmrl.types import Start
from vla_wmrl.world_model.latent import StateSpaceModel

SHIPPED = Path(__file__).resolve().parents[2] / "checkpoints" / "libero_long"


@pytest.fixture(scope="module")
def env():
    return LiberoEnv(EnvSpec(task_id=0, image_size=0, stepping="fast"))


def test_the_shipped_world_model_imagines_the_shipped_policy_as_mujoco_goes_on(env):
    """Two looks in free space: with the same imagined features the hands of both worlds are within a centimetre."""
    model = StateSpaceModel.from_pretrained(SHIPPED / "world_model")
    policy = FlowPolicy.from_pretrained(SHIPPED / "policy", eta=0.0)
    start = Start(0, 700)
    begin(env, start)
    state, _ = measure(env)
    assert not episode_on_imagined_looks(env, model, policy, start, Namespace(looks=2, seed=0, look_noise=None))
    real, _ = measure(env)
    (imagined,) = model.imagine(policy, [Start(0, 700, state=state)], [0], (0, 7), 2, stochastic=False, noisy=False)
    robots, _ = model.scenes.read(0, np.stack([state, real, imagined.states[-1]]))
    moved, apart = (robots[0] - robots[1])[:3].norm(), (robots[1] - robots[2])[:3].norm()
    assert env.steps == 16 and moved > 0.02 and apart < 0.01
