"""The state vector of a task: what a state-space world model steps. Names, layout, and how to read it off the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.libero import LiberoEnv

ROBOT = {"eef_pos": 3, "eef_rot": 6, "gripper_qpos": 2, "eef_vel": 3, "gripper_qvel": 2, "arm_qpos": 7}
OBJECT = {"pos": 3, "rot": 6, "vel": 3, "angvel": 3}
FIXTURE = {"pos": 3, "rot": 6}
JOINT = {"qpos": 1, "qvel": 1}


@dataclass(frozen=True)
class StateSpec:
    """Layout of the [S] float32 state vector of one task. Rotations are the first two columns of the matrix (6 numbers).

    `goal`: the task's conjuncts, as in sim.view. Metres, radians, seconds, world frame.
    """

    objects: tuple[str, ...]
    fixtures: tuple[str, ...]
    joints: tuple[str, ...]
    goal: tuple[tuple[str, ...], ...]

    @property
    def layout(self) -> dict[str, slice]:
        """Slice of every field, keyed "robot/eef_pos", "<object>/pos", "<fixture>/rot", "<joint>/qpos"."""
        fields = {f"robot/{k}": n for k, n in ROBOT.items()}
        for names, parts in ((self.objects, OBJECT), (self.fixtures, FIXTURE), (self.joints, JOINT)):
            fields |= {f"{name}/{k}": n for name in names for k, n in parts.items()}
        edges = np.cumsum([0, *fields.values()])
        return {name: slice(int(a), int(b)) for name, a, b in zip(fields, edges[:-1], edges[1:], strict=True)}

    @property
    def size(self) -> int:
        """S."""
        return list(self.layout.values())[-1].stop


def state_spec(env: LiberoEnv) -> StateSpec:
    """The layout of `env`'s task: its movable objects, its fixtures and their joints, in LIBERO's order."""
    ids = env.indices
    fixtures = tuple(name for name in ids["objects"] if name not in ids["movable"])
    return StateSpec(tuple(ids["movable"]), fixtures, tuple(ids["joints"]), ids["goal"])


def _rot6(mat: np.ndarray) -> np.ndarray:
    return mat.reshape(3, 3)[:, :2].T.reshape(6)


def read_state(env: LiberoEnv) -> np.ndarray:
    """[S] float32: the state of `env` now, in the layout of `state_spec(env)`. Brings derived poses up to date first."""
    import mujoco  # after sim.gl has chosen the renderer

    env.derive()
    ids, m, d = env.indices, env.model, env.data
    velocity = np.empty(6)
    mujoco.mj_objectVelocity(m, d, mujoco.mjtObj.mjOBJ_SITE, ids["grip_site"], velocity, 0)
    site = ids["grip_site"]
    parts = [d.site_xpos[site], _rot6(d.site_xmat[site]), d.qpos[ids["gripper_qpos"]], velocity[3:],
             d.qvel[ids["gripper_qvel"]], d.qpos[ids["arm_qpos"]]]  # fmt: skip
    for name, (_, dof) in ids["movable"].items():
        body = ids["objects"][name]
        parts += [d.xpos[body], _rot6(d.xmat[body]), d.qvel[dof : dof + 6]]
    for name, body in ids["objects"].items():
        if name not in ids["movable"]:
            parts += [d.xpos[body], _rot6(d.xmat[body])]
    for qpos, dof in ids["joints"].values():
        parts.append([d.qpos[qpos], d.qvel[dof]])
    return np.concatenate(parts).astype(np.float32)
