"""Stepper: a robosuite environment's control period in native code, and its controller state in and out."""

from __future__ import annotations

from collections.abc import Callable

import mujoco
import numpy as np

from sim import native
from sim.robosuite_stepping import SAMPLE_SUBSTEP


class Stepper:
    """Steps a robosuite single-arm Panda environment with an OSC_POSE controller, in place.

    Attach a new one after every `env.reset()`: robosuite makes a new mjModel, mjData, controller and gripper there.
    `mode`: "exact" (robosuite's bits), "near" (rounding), "fast" (one constraint solve a substep, for training).
    """

    def __init__(self, env, mode: str = "exact"):
        robot = env.robots[0]
        con = robot.controller
        supported = (
            len(env.robots) == 1 and con.name == "OSC_POSE" and con.joint_dim == 7 and con.impedance_mode == "fixed"
            and con.use_delta and con.uncoupling and con.interpolator_pos is None and con.position_limits is None
            and con.orientation_limits is None and type(robot.gripper).__name__ == "PandaGripper"
        )  # fmt: skip
        if not supported:
            raise NotImplementedError("native stepping covers one Panda arm with fixed-impedance delta OSC_POSE control")
        self.env, self.mode = env, native.MODES[mode]
        self.substeps = int(env.control_timestep / env.model_timestep)
        self.model, self.data = env.sim.model._model, env.sim.data._data
        self.con, self.gripper = con, robot.gripper
        self._attach(robot)
        self.pull()

    def _attach(self, robot) -> None:
        m, d, con = self.model, self.data, self.con
        self._jac, self._full = np.zeros((6, m.nv)), np.zeros((m.nv, m.nv))  # scratch of the kernel, kept alive here
        self.context = np.zeros(1, native.CONTEXT)
        c = self.context[0]
        site = self.env.sim.model.site_name2id(con.eef_name)
        c["model"], c["data"] = m._address, d._address
        arrays = {
            "qpos": d.qpos, "qvel": d.qvel, "ctrl": d.ctrl, "qM": d.qM, "bias": d.qfrc_bias, "jac": self._jac,
            "site_xpos": d.site_xpos[site], "site_xmat": d.site_xmat[site], "fullM": self._full,
        }  # fmt: skip
        for name, array in arrays.items():
            c[name] = array.ctypes.data
        c["nq"], c["nv"], c["nu"], c["site"] = m.nq, m.nv, m.nu, site
        c["qpos_adr"], c["qvel_adr"] = con.qpos_index, con.qvel_index
        c["act"], c["grip_act"] = robot._ref_joint_actuator_indexes, robot._ref_joint_gripper_actuator_indexes
        c["kp"], c["kd"], c["in_lo"], c["in_hi"] = con.kp, con.kd, con.input_min, con.input_max
        c["scale"] = abs(con.output_max - con.output_min) / abs(con.input_max - con.input_min)
        c["in_mid"] = (con.input_max + con.input_min) / 2.0
        c["out_mid"] = (con.output_max + con.output_min) / 2.0
        c["q0"] = con.initial_joint
        c["tau_lo"], c["tau_hi"] = robot.torque_limits
        limits = m.actuator_ctrlrange[robot._ref_joint_gripper_actuator_indexes]
        c["grip_mid"], c["grip_half"] = 0.5 * (limits[:, 1] + limits[:, 0]), 0.5 * (limits[:, 1] - limits[:, 0])
        c["grip_speed"] = self.gripper.speed

    def pull(self) -> None:
        """Copies the controller's memory out of robosuite (after a reset, or after robosuite's own steps)."""
        c, con = self.context[0], self.con
        c["new_update"] = con.new_update
        c["goal_pos"], c["goal_ori"], c["grip"] = con.goal_pos, con.goal_ori, self.gripper.current_action
        c["ee_pos"], c["ee_ori"], c["vel_pos"], c["vel_ori"] = con.ee_pos, con.ee_ori_mat, con.ee_pos_vel, con.ee_ori_vel
        c["q"], c["v"], c["JT"], c["M"] = con.joint_pos, con.joint_vel, con.J_full.T, con.mass_matrix

    def memory(self) -> dict[str, np.ndarray]:
        """The controller's memory, without anything that belongs to this process."""
        return {name: self.context[0][name].copy() for name in native.MEMORY_FIELDS}

    def set_memory(self, memory: dict[str, np.ndarray]) -> None:
        for name in native.MEMORY_FIELDS:
            self.context[0][name] = memory[name]

    def step(self, action: np.ndarray, observe: Callable[[], None] | None = None) -> None:
        """One control period with `action` [7]; `observe` is called where robosuite samples its observations."""
        if observe is None:
            return self.run(action)
        self.run(action, 0, SAMPLE_SUBSTEP + 1)
        observe()
        return self.run(action, SAMPLE_SUBSTEP + 1)

    def run(self, action: np.ndarray, first: int = 0, last: int | None = None) -> None:
        """Substeps [first, last) of one control period with `action` [7]; all of them by default."""
        own = self.model.opt.jacobian
        if self.mode != native.EXACT:  # many free objects make a block-diagonal Hessian, which "auto" takes for dense
            self.model.opt.jacobian = mujoco.mjtJacobian.mjJAC_SPARSE
        row = np.ascontiguousarray(action, dtype=np.float64).reshape(1, 7)
        try:
            native.run(self.context, row, first, self.substeps if last is None else last, self.mode)
        finally:
            self.model.opt.jacobian = own  # the model is shared with robosuite, whose own steps keep their bits
