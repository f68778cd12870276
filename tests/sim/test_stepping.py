"""Native stepping against robosuite's own `env.step`, side by side on the real task."""

import numpy as np
import pytest

from sim.libero import EnvSpec, LiberoEnv

BOUND = {"exact": 0.0, "near": 1e-8}


@pytest.fixture(scope="module")
def reference():
    """30 steps of robosuite, pushing down into contact: joint positions and observed states after each."""
    env = LiberoEnv(EnvSpec(task_id=0, image_size=0, stepping="robosuite", placements=1))
    env.reset(env.official_states[0])
    rng = np.random.default_rng(1)
    actions = np.clip(rng.normal(0, 0.4, (30, 7)) + np.array([0, 0, -0.8, 0, 0, 0, 0]), -1, 1)
    qpos, observed = [], []
    for action in actions:
        env.step(action)
        qpos.append(env.data.qpos.copy())
        observables = env._control.env._observables
        observed.append(np.array(observables["robot0_eef_pos"].obs))
    env.close()
    return env.official_states[0], actions, np.stack(qpos), np.stack(observed)


@pytest.mark.parametrize("mode", ["exact", "near"])
def test_native_steps_are_robosuites(reference, mode):
    state, actions, qpos, observed = reference
    env = LiberoEnv(EnvSpec(task_id=0, image_size=0, stepping=mode, placements=1))
    env.reset(state)
    worst, worst_look = 0.0, 0.0
    for action, expected, seen in zip(actions, qpos, observed, strict=True):
        env.step(action, sample=True)
        worst = max(worst, np.abs(env.data.qpos - expected).max())
        worst_look = max(worst_look, np.abs(env.look()["observation.state"][:3] - seen).max())
    env.close()
    # Bits rest on numba and robosuite sharing one BLAS; 1e-9 is the bound that must hold on any machine.
    assert worst <= max(BOUND[mode], 1e-9)
    assert worst_look <= 1e-6  # float32
