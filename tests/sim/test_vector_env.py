"""gymnasium's and lerobot's view of LIBERO is our simulator's, number for number."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from sim.gym_env import LiberoGymEnv, resolve
from sim.libero import LiberoEnv
from sim.rollout import begin
from sim.vector_env import LiberoVectorEnv
from sim.workers import WorkerError
from vla_wmrl.errors import UserError
from vla_wmrl.types import Start

ACTIONS = np.random.default_rng(0).uniform(-1, 1, (4, 2, 7)).astype(np.float32)
INITS, EPISODES = [0, 3], [0, 5]
LIMIT = 4  # control steps


@pytest.fixture(scope="module")
def vector(env):
    made = LiberoVectorEnv([env.spec] * 2, max_steps=LIMIT)
    yield made
    made.close()


@pytest.fixture
def begun(vector):
    vector.reset(options={"init_id": INITS, "episode": EPISODES})
    return vector


def flat(observation):
    return {"agent_pos": observation["agent_pos"], **observation["pixels"]}


def test_a_seed_means_the_same_initial_state_everywhere_and_what_does_not_exist_is_refused():
    assert resolve(1003, {}, "official") == {"init_id": 3, "episode": 20, "split": "official"}
    assert resolve(1003, {"init_id": 7}, "official") == {"init_id": 7, "episode": 0, "split": "official"}
    assert resolve(1003, {}, "train") == {"init_id": 1003, "episode": 0, "split": "train"}
    for options, message in (
        ({"init_ids": 3}, "did you mean init_id"),
        ({"init_id": 50}, "0 to 49"),
        ({"init_id": 1.5}, "not a number"),
        ({"split": "oficial"}, "did you mean official"),
    ):
        with pytest.raises(UserError, match=message):
            resolve(0, options, "official")


@pytest.mark.parametrize(
    "setting", [{"max_steps": 0}, {"max_steps": -1}, {"look_every": 1.5}, {"look_every": 0}, {"render_size": 0}]
)
def test_settings_that_mean_nothing_are_refused_and_not_taken_for_the_default(env, setting):
    with pytest.raises(UserError, match=f"{next(iter(setting))}=.* from 1 up"):
        LiberoGymEnv(env.spec, **setting)


def test_observations_and_rewards_are_those_of_our_own_simulator(env, vector):
    seen = [flat(vector.reset(options={"init_id": INITS, "episode": EPISODES})[0])]
    seen += [flat(vector.step(actions)[0]) for actions in ACTIONS]
    for i in range(2):
        begin(env, Start(env.spec.task_id, INITS[i], EPISODES[i], split="official"))
        for number, observation in enumerate(seen):
            if number:
                env.step(ACTIONS[number - 1][i], sample=True)
            own = env.look()
            np.testing.assert_array_equal(observation["agent_pos"][i], own["observation.state"])
            np.testing.assert_array_equal(observation["image"][i], own["observation.images.image"])
            np.testing.assert_array_equal(observation["image2"][i], own["observation.images.image2"])


def test_observations_and_actions_are_inside_the_declared_spaces(begun):
    assert begun.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    observation, *_ = begun.step(ACTIONS[0])
    assert observation in begun.observation_space and ACTIONS[0] in begun.action_space


def test_a_wrong_action_names_env_and_step_and_moves_nothing(begun):
    begun.step(ACTIONS[0])
    states = [e.env.snapshot().physics for e in begun.inner.envs]
    bad = ACTIONS[1].copy()
    bad[1, 2] = np.nan
    with pytest.raises(ValueError, match="env 1, step 2: the action is not finite"):
        begun.step(bad)
    with pytest.raises(ValueError, match=r"env 0, step 2: an action has shape \(7,\), not \(6,\)"):
        begun.step(ACTIONS[1][:, :6])
    with pytest.raises(ValueError, match=r"step \[2, 2\]: 2 environments take actions \[2, 7\], not \[1, 7\]"):
        begun.step(ACTIONS[1][:1])
    for before, e in zip(states, begun.inner.envs, strict=True):
        np.testing.assert_array_equal(before, e.env.snapshot().physics)


def test_a_limit_is_no_success_and_an_episode_that_is_over_is_not_stepped(begun):
    for number, actions in enumerate(ACTIONS, 1):
        _, reward, terminated, truncated, infos = begun.step(actions)
        assert not terminated.any() and not reward.any() and not infos["success"].any()
        assert truncated.tolist() == [number == LIMIT] * 2
    with pytest.raises(RuntimeError, match="env 0, step 5: its episode is over"):
        begun.step(ACTIONS[0])
    begun.reset(options={"reset_mask": np.array([True, False]), "init_id": 1})
    with pytest.raises(RuntimeError, match="env 1, step 5: its episode is over"):
        begun.step(ACTIONS[0])


def test_success_terminates_one_environment_alone(begun, monkeypatch):
    original, first = LiberoEnv.step, begun.inner.envs[0].env
    monkeypatch.setattr(LiberoEnv, "step", lambda self, a, sample=False: original(self, a, sample) or self is first)
    _, reward, terminated, truncated, infos = begun.step(ACTIONS[0])
    assert terminated.tolist() == [True, False] and not truncated.any()
    assert reward.tolist() == [1.0, 0.0] and infos["success"].tolist() == [True, False]
    assert infos["init_id"].tolist() == INITS and infos["episode"].tolist() == EPISODES


def test_cameras_run_only_at_looks(env, monkeypatch):
    made = LiberoVectorEnv([replace(env.spec, image_size=16)], look_every=3, max_steps=5)
    rendered = []
    original = LiberoEnv.render
    monkeypatch.setattr(LiberoEnv, "render", lambda self, *a: rendered.append(self.steps) or original(self, *a))
    made.reset(seed=2)
    looked = [made.step(ACTIONS[0][:1])[4]["looked"].item() for _ in range(5)]
    assert looked == [False, False, True, False, True]  # every third, and the last
    assert len(rendered) == 3 * 2  # with the reset; two cameras
    assert made.render()[0].shape == (16, 16, 3) and len(rendered) == 6
    made.close()


def test_processes_give_the_same_numbers_and_a_killed_one_is_named_and_none_stays(env, begun):
    own = begun.step(ACTIONS[0])
    made = LiberoVectorEnv([env.spec] * 2, processes=True, max_steps=LIMIT)
    made.reset(options={"init_id": INITS, "episode": EPISODES})
    other = made.step(ACTIONS[0])
    for name, value in flat(own[0]).items():
        np.testing.assert_array_equal(value, flat(other[0])[name])
    processes = made.inner.processes
    processes[1].kill()
    with pytest.raises(WorkerError, match=r"env \[1\] died in step \(exit codes \[-9\]\)"):
        made.step(ACTIONS[1])
    assert not any(p.is_alive() for p in processes)
    made.close()


def test_lerobots_own_evaluation_runs_a_policy_on_it(policy_folder, tmp_path, monkeypatch):
    from lerobot.scripts.lerobot_eval import eval_main

    monkeypatch.chdir(policy_folder)  # lerobot looks for the checkpoint's `vlm` in the working directory
    arguments = {
        "env.discover_packages_path": "sim.lerobot_env", "env.type": "vla_wmrl_libero", "env.task_ids": "[0]",
        "env.image_size": 32, "env.stepping": "fast", "env.lod_mm": 8, "env.multisample": 0, "env.episode_length": 10,
        "env.look_every": 8, "policy.path": policy_folder, "eval.n_episodes": 2, "eval.batch_size": 2,
        "eval.use_async_envs": "false", "output_dir": tmp_path / "out",
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["lerobot-eval", *(f"--{k}={v}" for k, v in arguments.items())])
    eval_main()
    found = json.loads((tmp_path / "out" / "eval_info.json").read_text())
    assert found["overall"]["n_episodes"] == 2 and found["per_task"][0]["metrics"]["successes"] == [False, False]
