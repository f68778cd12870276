"""robosuite's own `env.step` behind the interface of sim.stepping.Stepper: the reference, and the fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import version

import numpy as np

# robosuite's float timers make it sample observations (images too) after this substep of the 25, counted from 0.
SAMPLE_SUBSTEP = 23
TESTED = {"mujoco": "3.3.", "robosuite": "1.4."}  # native stepping calls functions whose signatures change after them


@cache
def native_is_tested() -> bool:
    """Whether native stepping may run on the installed MuJoCo and robosuite. Warns, once a process, when it may not."""
    other = [f"{name} {version(name)}" for name, known in TESTED.items() if not version(name).startswith(known)]
    if other:
        known = " and ".join(f"{name} {prefix}x" for name, prefix in TESTED.items())
        warnings.warn(
            f"{', '.join(other)}: native stepping is tested with {known} only, so robosuite's own env.step is used instead",
            stacklevel=4,
        )
    return not other


class RobosuiteStepper:
    """Steps by `env.step`. The controller's memory goes in and out under the names that native stepping gives it."""

    def __init__(self, env):
        self.env, self.con, self.gripper = env, env.robots[0].controller, env.robots[0].gripper

    def memory(self) -> dict[str, np.ndarray]:
        con, grip = self.con, np.broadcast_to(self.gripper.current_action, 2)
        held = {
            "new_update": con.new_update, "goal_pos": con.goal_pos, "goal_ori": con.goal_ori, "grip": grip,
            "ee_pos": con.ee_pos, "ee_ori": con.ee_ori_mat, "vel_pos": con.ee_pos_vel, "vel_ori": con.ee_ori_vel,
            "q": con.joint_pos, "v": con.joint_vel, "JT": con.J_full.T, "M": con.mass_matrix,
        }  # fmt: skip
        return {name: np.array(value) for name, value in held.items()}

    def set_memory(self, memory: dict[str, np.ndarray]) -> None:
        m, con = {name: np.array(value) for name, value in memory.items()}, self.con
        con.new_update, con.goal_pos, con.goal_ori = bool(m["new_update"]), m["goal_pos"], m["goal_ori"]
        self.gripper.current_action = m["grip"]
        con.ee_pos, con.ee_ori_mat, con.ee_pos_vel, con.ee_ori_vel = m["ee_pos"], m["ee_ori"], m["vel_pos"], m["vel_ori"]
        con.joint_pos, con.joint_vel = m["q"], m["v"]
        con.J_full = m["JT"].T  # in Fortran order, as robosuite's own indexing leaves it: it decides the last bit
        con.J_pos, con.J_ori = np.asfortranarray(con.J_full[:3]), np.asfortranarray(con.J_full[3:])
        con.mass_matrix = np.asfortranarray(m["M"])
        self.env.timestep, self.env.done = 0, False  # robosuite's own horizon; LIBERO's limit is the caller's

    def step(self, action: np.ndarray, observe: Callable[[], None] | None = None) -> None:
        """One control period with `action` [7]; `observe` is called where robosuite samples its own observations."""
        own, done = self.env._update_observables, 0

        def update_and_observe() -> None:
            nonlocal done
            own()
            if done == SAMPLE_SUBSTEP:
                observe()
            done += 1

        if observe is not None:
            self.env._update_observables = update_and_observe
        try:
            self.env.step(np.asarray(action, dtype=np.float64))
        finally:
            self.env.__dict__.pop("_update_observables", None)
