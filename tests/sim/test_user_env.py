"""Environments of users: a plain robosuite task and a bare MuJoCo one, through the six methods."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sim.evaluate import EvalPlan, evaluate, summary
from sim.rollout import PolicyRef, RolloutJob, begin, run
from sim.user_env import UserEnv, UserSpec
from sim.workers import Context, Pool
from vla_wmrl.errors import UserError
from vla_wmrl.types import Start

LIFT = UserSpec("sim.robosuite_env:RobosuiteAdapter", {"env_name": "Lift", "image_size": 32}, "lift the red cube", 16)
ACTIONS = np.clip(np.random.default_rng(2).normal(0, 0.4, (40, 7)) - [0, 0, 0.5, 0, 0, 0, 0], -1, 1)

CART = """
<mujoco><worldbody>
  <camera name="side" pos="0 -2 .5" xyaxes="1 0 0 0 0 1"/>
  <body name="cart"><joint name="slide" type="slide" axis="1 0 0" damping=".1"/><geom size=".1" mass="1"/></body>
</worldbody><actuator><motor joint="slide"/></actuator></mujoco>
"""


class Cart:
    """docs/simulator.md's example: a bare MuJoCo model that is done where the cart passed `goal` (m)."""

    def __init__(self, goal: float):
        import mujoco

        self.mujoco, self.goal = mujoco, goal
        self.model = mujoco.MjModel.from_xml_string(CART)
        self.data = mujoco.MjData(self.model)

    def reset(self, init_id, seed):
        self.mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = np.random.default_rng([init_id, seed]).uniform(-0.1, 0.1)
        self.mujoco.mj_forward(self.model, self.data)

    def step(self, action):
        self.data.ctrl[:] = action[:1]
        self.mujoco.mj_step(self.model, self.data, nstep=25)
        return self.data.qpos[0] > self.goal

    def look(self):
        return {"observation.state": np.concatenate([self.data.qpos, self.data.qvel]).astype(np.float32)}

    def save(self):
        state = np.empty(self.mujoco.mj_stateSize(self.model, self.mujoco.mjtState.mjSTATE_INTEGRATION))
        self.mujoco.mj_getState(self.model, self.data, state, self.mujoco.mjtState.mjSTATE_INTEGRATION)
        return {"physics": state}

    def load(self, state):
        self.mujoco.mj_setState(self.model, self.data, state["physics"], self.mujoco.mjtState.mjSTATE_INTEGRATION)

    def close(self):
        pass


CART_SPEC = UserSpec(f"{__name__}:Cart", {"goal": 0.5})


def test_plain_robosuite_steps_natively_with_its_own_bits_and_restores():
    ends = {}
    for stepping in ("robosuite", "exact"):
        env = UserEnv(replace(LIFT, arguments={"env_name": "Lift", "image_size": 32, "stepping": stepping}))
        begin(env, Start(0, 3))
        for action in ACTIONS[:20]:
            env.step(action)
        saved = env.snapshot()
        for action in ACTIONS[20:]:
            env.step(action)
        ends[stepping] = env.adapter.data.qpos.copy()
        env.restore(saved)
        assert env.steps == 20
        for action in ACTIONS[20:]:
            env.step(action)
        np.testing.assert_array_equal(env.adapter.data.qpos, ends[stepping])
        env.close()
    assert np.abs(ends["exact"] - ends["robosuite"]).max() <= 1e-9


def test_a_policy_runs_in_a_users_environment_and_episodes_do_not_depend_on_each_other(policy_folder):
    ref, env = PolicyRef(str(policy_folder)), LIFT.build()
    policy = ref.load(Context(0))
    job = RolloutJob(LIFT, tuple(Start(0, i) for i in range(3)), (0,) * 3, ref, (0,), width=2, video_size=32)
    together = run(env, policy, job)
    alone = run(env, policy, replace(job, starts=job.starts[2:], members=(0,)))[0]
    env.close()
    np.testing.assert_array_equal(together[2].rollout.chain, alone.rollout.chain)
    assert together[0].rollout.steps == LIFT.max_steps and together[0].rollout.truncated
    assert not np.array_equal(together[0].rollout.states, together[1].rollout.states)
    assert together[0].frames.shape == (LIFT.max_steps + 1, 32, 32, 3)


def test_the_documented_example_runs(policy_folder, tmp_path):
    plan = EvalPlan((LIFT,), (0, 1), PolicyRef(str(policy_folder)), seed=0, split="train")
    with Pool(1) as pool:
        rows = evaluate(plan, pool, tmp_path, "episodes", "lift")
    assert [json.loads(line)["env_name"] for line in (tmp_path / "episodes.jsonl").read_text().splitlines()] == ["Lift"] * 2
    assert summary(rows, 2)[-1]["episodes"] == 2


def test_a_bare_mujoco_model_needs_no_more_than_the_six_methods():
    env = CART_SPEC.build()
    begin(env, Start(0, 1))
    saved = env.snapshot()
    ends = []
    for _ in range(2):
        env.restore(saved)
        while not env.step(np.ones(1), sample=True):
            assert env.steps < env.max_steps
        ends.append((env.steps, env.snapshot().observation["observation.state"].tobytes()))
    assert ends[0] == ends[1]
    with pytest.raises(ValueError, match="control step"):
        env.step(np.array([np.nan]))


@pytest.mark.parametrize("adapter", [f"{__name__}:Carts", "no_such_module:Cart", "Cart"])
def test_an_adapter_that_is_not_there_is_a_users_mistake(adapter):
    with pytest.raises(UserError, match=r"adapter"):
        begin(UserSpec(adapter).build(), Start(0, 0))
