"""Films of anchors and of their imagined twins: what happened | what the world model imagined | the difference."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sim.libero import EnvSpec, LiberoEnv
from sim.state import state_spec
from sim.workers import Context
from vla_wmrl.types import Rollout, Start

SIZE = 192  # pixels of one picture
ITERATIONS, DAMPING = 40, 1e-4  # of the inverse kinematics


@dataclass(frozen=True)
class TwinJob:
    """One film [F, SIZE, 3 SIZE, 3] uint8, a picture a look; who ended first keeps the last picture."""

    spec: EnvSpec
    start: Start
    real: np.ndarray = field(repr=False)  # [K + 1, S]
    imagined: np.ndarray = field(repr=False)  # [L + 1, S]

    @classmethod
    def of(cls, spec: EnvSpec, real: Rollout, twin: Rollout) -> TwinJob:
        return cls(spec, real.start, real.states, twin.states)

    @property
    def affinity(self) -> tuple:
        return (self.spec,)

    def run(self, context: Context) -> np.ndarray:
        env = context.keep(("env", self.spec), lambda: LiberoEnv(self.spec))
        films = []
        for states in (self.real, self.imagined):
            env.restore(self.start.snapshot)
            pictures = []
            for state in states:
                put_state(env, state)
                pictures.append(env.render("agentview", SIZE))
            films.append(pictures)
        frames = []
        for look in range(max(map(len, films))):
            real, imagined = (film[min(look, len(film) - 1)] for film in films)
            error = np.abs(real.astype(np.int16) - imagined).astype(np.uint8)
            frames.append(np.concatenate([real, imagined, error], axis=1))
        return np.stack(frames)


def put_state(env: LiberoEnv, state: np.ndarray) -> None:
    """Moves `env` to look like `state` [S], for a picture: what moves it afterwards is not set (restore a snapshot).

    The arm is bent until the hand is where the state has it; the world model does not step the arm's own joints.
    """
    import mujoco  # after sim.gl has chosen the renderer

    layout, ids, m, d = state_spec(env).layout, env.indices, env.model, env.data
    part = lambda name: np.asarray(state[layout[name]], dtype=np.float64)  # noqa: E731
    d.qpos[ids["gripper_qpos"]] = part("robot/gripper_qpos")
    for name, (qpos, _) in ids["movable"].items():
        quat = np.empty(4)
        mujoco.mju_mat2Quat(quat, _matrix(part(f"{name}/rot")).ravel())
        d.qpos[qpos : qpos + 7] = np.concatenate([part(f"{name}/pos"), quat])
    for name, (qpos, _) in ids["joints"].items():
        d.qpos[qpos] = part(f"{name}/qpos")[0]
    _reach(m, d, ids, part("robot/eef_pos"), _matrix(part("robot/eef_rot")))


def _reach(m, d, ids: dict, pos: np.ndarray, mat: np.ndarray) -> None:
    """Bends the arm until the grip site is at `pos` [3] with axes `mat` [3, 3]: damped least squares."""
    import mujoco

    site, arm = ids["grip_site"], ids["arm_qpos"]
    dofs = [int(m.jnt_dofadr[np.flatnonzero(m.jnt_qposadr == q)[0]]) for q in arm]
    jacobian = np.zeros((6, m.nv))
    for _ in range(ITERATIONS):
        mujoco.mj_kinematics(m, d)
        mujoco.mj_comPos(m, d)
        axes = d.site_xmat[site].reshape(3, 3)
        error = np.concatenate([pos - d.site_xpos[site], 0.5 * np.cross(axes, mat, axis=0).sum(1)])
        if np.abs(error).max() < 1e-4:
            break
        mujoco.mj_jacSite(m, d, jacobian[:3], jacobian[3:], site)
        j = jacobian[:, dofs]
        d.qpos[arm] += j.T @ np.linalg.solve(j @ j.T + DAMPING * np.eye(6), error)
    mujoco.mj_forward(m, d)


def _matrix(rot6: np.ndarray) -> np.ndarray:
    """[3, 3] from its first two columns [6], made orthonormal."""
    x = rot6[:3] / np.linalg.norm(rot6[:3])
    y = rot6[3:] - x * (x @ rot6[3:])
    y = y / np.linalg.norm(y)
    return np.stack([x, y, np.cross(x, y)], axis=1)
