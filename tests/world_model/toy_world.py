"""A toy task with two objects and a basket, in the layout of sim.state, and a policy that needs no network."""

import numpy as np
import torch

from vla_wmrl.policies.base import ChunkSample
from vla_wmrl.policies.noise import noise
from vla_wmrl.world_model.base import OPEN_HAND, TaskSpec, Trajectory
from vla_wmrl.world_model.latent import FitConfig

torch.set_num_threads(1)
ROBOT = {"eef_pos": 3, "eef_rot": 6, "gripper_qpos": 2, "eef_vel": 3, "gripper_qvel": 2, "arm_qpos": 7}
OBJECT = {"pos": 3, "rot": 6, "vel": 3, "angvel": 3}
SMALL = FitConfig(stages=((0.5, 4, 16), (1.0, 8, 8)))
TOKENS, WIDTH = 4, 6


def make_task(task_id: int, objects: tuple[str, ...]) -> TaskSpec:
    fields = {f"robot/{k}": n for k, n in ROBOT.items()}
    fields |= {f"{name}/{k}": n for name in objects for k, n in OBJECT.items()}
    edges = np.cumsum([0, *fields.values()])
    layout = {name: (int(a), int(b)) for name, a, b in zip(fields, edges[:-1], edges[1:], strict=True)}
    goal = tuple(("in", name, "basket_1_contain_region") for name in objects if not name.startswith(("basket", "milk")))
    return TaskSpec(task_id, f"put {task_id} away", layout, objects, (), (), goal)


def make_trace(task: TaskSpec, seed: int, steps: int = 20) -> Trajectory:
    """The hand moves by its actions; the first object follows it in the second half; nothing is physical."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (steps, 7)).astype(np.float32)
    states = np.zeros((steps + 1, task.size), dtype=np.float32)
    put = lambda name, value: states.__setitem__((slice(None), slice(*task.layout[name])), value)  # noqa: E731
    path = np.cumsum(np.vstack([[0, 0, 0.6], actions[:, :3] * 0.0125]), axis=0)
    put("robot/eef_pos", path)
    put("robot/eef_rot", [0, 1, 0, 1, 0, 0])
    put("robot/gripper_qpos", [0.04, -0.04])
    for i, name in enumerate(task.objects):
        still = np.array([0.1 * i, 0.1, 0.45]) + rng.normal(0, 0.01, 3) * [1, 1, 0]
        held = np.arange(steps + 1)[:, None] >= steps // 2
        put(f"{name}/pos", np.where(held & (i == 0), path - path[steps // 2] + still, still))
        put(f"{name}/rot", [1, 0, 0, 0, 1, 0])
    success = np.zeros(steps + 1, dtype=bool)
    success[-1] = seed % 2 == 0
    progress = np.linspace(0, 0.5, steps + 1, dtype=np.float32)
    return Trajectory(task.task_id, seed, states, actions, progress, success, OPEN_HAND)


class ToyPolicy:
    """Chunks that depend on inputs and key."""

    n_action_steps, horizon, padded_dim, action_dim = 4, 6, 7, 7

    def inputs_from_features(self, features, state, task):
        return {"features": features, "state": state, "lang_tokens": torch.zeros(len(task), 2, dtype=torch.int64)}

    def integrate(self, inputs, x, chosen, noises):
        pull = torch.tanh(inputs["features"].mean((1, 2)) + inputs["state"].sum(-1))[:, None, None]
        return torch.stack([x, 0.3 * x + pull], dim=1)

    def sample(self, inputs, keys, stochastic):
        x = torch.from_numpy(np.stack([noise(k, (6, 7)) for k in keys]))
        chain = self.integrate(inputs, x, None, None)
        return ChunkSample(chain[:, -1].clamp(-1, 1), chain, torch.zeros(len(keys), dtype=torch.int64))
