"""Plain robosuite tasks (Lift, Door, Stack, ...) through sim.user_env: one Panda with OSC_POSE, stepped natively.

The example of an adapter: `UserSpec("sim.robosuite_env:RobosuiteAdapter", {"env_name": "Lift"}, "lift the red cube")`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import mujoco
import numpy as np

from sim.protocol import CAMERAS, STATE_KEY, axis_angle
from sim.robosuite_stepping import RobosuiteStepper
from sim.suites import numpy_seed

PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION


class RobosuiteAdapter:
    """One robosuite 1.4 task. `stepping`: as sim.libero.EnvSpec; images [image_size, image_size, 3], not rotated."""

    def __init__(self, env_name: str = "Lift", image_size: int = 64, stepping: str = "exact"):
        logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it asks for a private macro file
        import robosuite

        self.image_size, self.stepping, self._renderer = image_size, stepping, None
        controller = robosuite.load_controller_config(default_controller="OSC_POSE")
        with numpy_seed(0):  # a constructor may draw too: Lift does the size of its cube
            self.env = robosuite.make(
                env_name, robots="Panda", controller_configs=controller, has_renderer=False, has_offscreen_renderer=False,
                use_camera_obs=False, control_freq=20, ignore_done=True, hard_reset=False,
            )  # fmt: skip

    @property
    def model(self) -> mujoco.MjModel:
        return self.env.sim.model._model

    @property
    def data(self) -> mujoco.MjData:
        return self.env.sim.data._data

    def reset(self, init_id: int, seed: int) -> None:
        with numpy_seed([init_id, seed]):
            self.env.reset()
        self._attach()

    def _attach(self) -> None:
        """A new stepper: robosuite makes new controllers in every reset."""
        if self.stepping == "robosuite":
            self.stepper = RobosuiteStepper(self.env)
        else:
            from sim.stepping import Stepper

            self.stepper = Stepper(self.env, self.stepping)

    def step(self, action: np.ndarray) -> bool:
        self.stepper.step(action)
        return bool(self.env._check_success())

    def look(self) -> dict[str, np.ndarray]:
        robot, data = self.env.robots[0], self.data
        hand = data.xquat[self.model.body(robot.robot_model.eef_name).id][[1, 2, 3, 0]]
        fingers = data.qpos[robot._ref_gripper_joint_pos_indexes]
        state = np.concatenate([data.site_xpos[robot.eef_site_id], axis_angle(hand), fingers]).astype(np.float32)
        return {key: self._render(camera) for key, camera in CAMERAS.items()} | {STATE_KEY: state}

    def _render(self, camera: str) -> np.ndarray:
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self.model, self.image_size, self.image_size)
            self._option = mujoco.MjvOption()
            self._option.geomgroup[0] = 0  # collision geometry
        self._renderer.update_scene(self.data, camera, self._option)
        return self._renderer.render()

    def save(self) -> dict[str, np.ndarray]:
        physics = np.empty(mujoco.mj_stateSize(self.model, PHYSICS))
        mujoco.mj_getState(self.model, self.data, physics, PHYSICS)
        poses = {"body_pos": self.model.body_pos.copy(), "body_quat": self.model.body_quat.copy()}  # Door moves its frame
        return {"physics": physics, **poses, **{f"memory/{k}": v for k, v in self.stepper.memory().items()}}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self.model.body_pos[:], self.model.body_quat[:] = state["body_pos"], state["body_quat"]
        mujoco.mj_setState(self.model, self.data, state["physics"], PHYSICS)
        for stage in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_comVel):
            stage(self.model, self.data)
        self.stepper.set_memory({k.removeprefix("memory/"): v for k, v in state.items() if k.startswith("memory/")})

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self.env.close()
