"""Native stepping against robosuite's own `env.step`, side by side on the real task."""

import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest

from sim import robosuite_stepping
from sim.libero import EnvSpec, LiberoEnv
from sim.protocol import SETTLE_ACTION, SETTLE_STEPS
from sim.suites import libero_modules, numpy_seed

BOUND = {"robosuite": 0.0, "exact": 0.0, "near": 1e-8}


ACTIONS = np.clip(np.random.default_rng(1).normal(0, 0.4, (30, 7)) - [0, 0, 0.8, 0, 0, 0, 0], -1, 1)
ACTIONS[2, 3:6] = 1e-300, 0.0, -1e-200  # a rotation, of no angle: its squares underflow


@pytest.fixture(scope="module")
def reference():
    """30 steps of LIBERO's own environment, pushing down into contact: joint positions and observed states after each."""
    env = LiberoEnv(EnvSpec(task_id=0, image_size=0, placements=1))
    _, _, control_env = libero_modules()
    with numpy_seed(0):
        own = control_env(bddl_file_name=env.task.bddl, use_camera_obs=False, has_renderer=False, has_offscreen_renderer=False)
    own.env._get_observations(force_update=True)  # as `reset` ends: it sets the phase of the observations' timers
    own.set_init_state(env.official_states[0])
    for _ in range(SETTLE_STEPS):
        own.step(SETTLE_ACTION)
    qpos, observed = [], []
    for action in ACTIONS:
        own.step(action)
        qpos.append(own.env.sim.data.qpos.copy())
        observed.append(np.array(own.env._observables["robot0_eef_pos"].obs))
    own.close()
    return env.official_states[0], ACTIONS, np.stack(qpos), np.stack(observed)


@pytest.mark.parametrize("mode", ["robosuite", "exact", "near"])
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


def test_snapshots_pass_between_robosuites_stepping_and_ours():
    """A start that one mode left is the same start in the other, the stale first step after a reset included."""
    ends = []
    for first, second in (("exact", "robosuite"), ("robosuite", "exact")):
        envs = [LiberoEnv(EnvSpec(task_id=0, image_size=0, stepping=mode, placements=1)) for mode in (first, second)]
        envs[0].reset(envs[0].official_states[0])
        for action in ACTIONS[:8]:
            envs[0].step(action)
        envs[1].restore(envs[0].snapshot())
        for action in ACTIONS[8:12]:
            envs[1].step(action)
        ends.append(envs[1].data.qpos.copy())
        for env in envs:
            env.close()
    assert np.abs(ends[0] - ends[1]).max() <= 1e-9


def test_environments_stepped_by_threads_have_the_bits_of_one_alone(env):
    ends = {}

    def walk(name, simulator):
        simulator.reset(simulator.official_states[0])
        for action in ACTIONS:
            simulator.step(action)
        ends[name] = simulator.data.qpos.copy()

    blind = [LiberoEnv(replace(env.spec, image_size=0)) for _ in range(3)]  # a renderer belongs to one thread
    threads = [threading.Thread(target=walk, args=(i, simulator)) for i, simulator in enumerate(blind[:2])]
    walk("alone", blind[2])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for simulator in blind:
        simulator.close()
    np.testing.assert_array_equal(ends[0], ends["alone"])
    np.testing.assert_array_equal(ends[1], ends["alone"])


def test_versions_that_were_not_tested_fall_back_to_robosuites_stepping_with_one_warning(monkeypatch):
    monkeypatch.setattr(robosuite_stepping, "version", lambda name: {"mujoco": "3.4.1", "robosuite": "1.4.0"}[name])
    robosuite_stepping.native_is_tested.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        specs = [EnvSpec(stepping=mode) for mode in ("exact", "fast", "robosuite")]
    robosuite_stepping.native_is_tested.cache_clear()
    assert [spec.stepping for spec in specs] == ["robosuite"] * 3
    assert len(said) == 1 and "mujoco 3.4.1" in str(said[0].message)
