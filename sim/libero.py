"""LIBERO tasks as environments."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sim.protocol import CAMERAS, MAX_STEPS, SETTLE_ACTION, SETTLE_STEPS, STATE_KEY, axis_angle, check_action, max_steps
from sim.robosuite_stepping import RobosuiteStepper, native_is_tested
from sim.snapshot import Snapshot
from sim.suites import did_you_mean, find_task, libero_modules, numpy_seed, official_states, quiet
from sim.view import Pose, Region, View
from vla_wmrl.config import base_suite
from vla_wmrl.errors import UserError, require

LARGEST = 1e3  # of an initial state's positions and velocities
STEPPING = ("robosuite", "exact", "near", "fast")


def is_count(value: object, least: int = 0) -> bool:
    """Whether `value` is a whole number from `least` up, numpy's included."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class EnvSpec:
    """What it takes to build one environment in any process. Numbers and names only, so it pickles.

    `stepping`: "robosuite" (its own `env.step`), "exact" (the same bits, natively), "near" (rounding), "fast" (training).
    `lod_mm`, `multisample`: level of detail and antialiasing of images (see sim.render). `markers`: draw robosuite's
    marks of the grip site (a ball and a line), which LIBERO's images do not have. `placements`: how many fixture placements
    the bank holds, from which an episode's key draws.
    """

    suite: str = "libero_10"
    task_id: int = 0
    image_size: int = 64
    stepping: str = "exact"
    lod_mm: float = 0.0
    multisample: int = 4
    markers: bool = False
    placements: int = 8

    def __post_init__(self) -> None:
        if base_suite(str(self.suite)) is None:
            raise UserError(f"unknown suite {self.suite!r}{did_you_mean(self.suite, MAX_STEPS)}")
        if self.stepping not in STEPPING:
            raise UserError(f"unknown stepping {self.stepping!r}{did_you_mean(self.stepping, STEPPING)}")
        for name, least in (("task_id", 0), ("image_size", 0), ("multisample", 0), ("placements", 1)):
            value = getattr(self, name)
            require(is_count(value, least), f"{name}={value!r} is not a whole number from {least} up")
        require(0 <= self.lod_mm < np.inf, f"lod_mm={self.lod_mm} is not a size in mm: use 0 for the original meshes")
        if self.stepping != "robosuite" and not native_is_tested():
            object.__setattr__(self, "stepping", "robosuite")  # here, so that rows and manifests name what ran

    def build(self) -> LiberoEnv:
        return LiberoEnv(self)

    def row(self) -> dict[str, object]:
        """What every result's row says about the environment."""
        return {"suite": self.suite, "task_id": self.task_id, "stepping": self.stepping, "lod_mm": self.lod_mm,
                "multisample": self.multisample, "markers": self.markers}  # fmt: skip


def _warnings(data) -> str:
    """What MuJoCo warned of, in its own words: BADQPOS, CONTACTFULL, ..."""
    import mujoco

    kinds = [kind for kind in mujoco.mjtWarning.__members__.values() if int(kind) < len(data.warning.number)]
    names = [kind.name.removeprefix("mjWARN_") for kind in kinds if data.warning.number[int(kind)]]
    return f"MuJoCo diverged or overflowed ({', '.join(names) or 'it reset its state'})"


class LiberoEnv:
    """One LIBERO task. Lazy: the simulator is built at first use, in the process that uses it.

    reset -> step ... step(sample=True) -> look. An observation is made when the policy looks, not at every step:
    `step(action, sample=True)` announces it, so that it is taken inside that control period, where robosuite takes its own.
    """

    def __init__(self, spec: EnvSpec):
        self.spec = spec
        self.task = find_task(spec.suite, spec.task_id)
        self.max_steps = max_steps(spec.suite)
        self.steps = 0  # control steps since the end of settling
        self.episode: tuple[int, ...] = ()  # the key of the last reset, or what a rollout calls its episode, for messages
        self._observation: dict[str, np.ndarray] = {}
        self._bank: list[Snapshot] = []
        self._renderer = None

    @cached_property
    def official_states(self) -> np.ndarray:
        return official_states(self.spec.suite, self.spec.task_id)

    @cached_property
    def _control(self):
        """LIBERO's ControlEnv, built (and thereby reset once) without cameras: we render ourselves."""
        _, _, control_env = libero_modules()
        from sim.model_cache import compiling_from_cache

        with quiet(), numpy_seed(0), compiling_from_cache() as made:
            control = control_env(
                bddl_file_name=self.task.bddl, use_camera_obs=False, has_renderer=False, has_offscreen_renderer=False
            )
        self._pictures = made[-1]
        self._mark(control)
        if self.spec.stepping == "robosuite":
            self._stepper = RobosuiteStepper(control.env)
        else:
            from sim.stepping import Stepper

            self._stepper = Stepper(control.env, self.spec.stepping)
        return control

    def _mark(self, control) -> None:
        """Hides robosuite's marks, as its `reset` does (a negative alpha) and its constructor does not; or shows them."""
        control.env.visualize(vis_settings=dict.fromkeys(control.env._visualizations, False))
        if self.spec.markers:
            alpha = control.env.sim.model._model.site_rgba[:, 3]
            alpha[:] = np.abs(alpha)

    @property
    def model(self):
        return self._control.env.sim.model._model

    @property
    def data(self):
        return self._control.env.sim.data._data

    # ---- resets
    def _place(self, seed: int) -> None:
        """Draws what `env.reset()` would draw: poses of fixtures (in the model) and of objects, joints of doors and knobs.

        LIBERO's own samplers (`_reset_internal`), without recompiling the model, which only differs in these poses.
        """
        import mujoco
        from robosuite.utils.errors import RandomizationError

        env, sim = self._control.env, self._control.env.sim
        with quiet(), numpy_seed(seed):
            while True:
                for sampler in env.object_property_initializers:
                    env.object_states_dict[sampler.name].set_joint(sampler.sample())
                mujoco.mj_step1(self.model, self.data)
                try:  # LIBERO draws again until the objects do not overlap
                    placed = env.placement_initializer.sample()
                    placed = env.conditional_placement_initializer.sample(sim, placed)
                    placed = env.conditional_placement_on_objects_initializer.sample(placed)
                    break
                except RandomizationError:
                    continue
        for pos, quat, body in placed.values():
            if body.name in env.fixtures_dict:
                index = sim.model.body_name2id(body.root_body)
                self.model.body_pos[index], self.model.body_quat[index] = pos, quat
            else:
                sim.data.set_joint_qpos(body.joints[-1], np.concatenate([pos, quat]))

    def _fixtures(self, key: tuple[int, ...]) -> Snapshot:
        """The reset that `key` draws from the bank: the simulator as built, with another placement of its fixtures."""
        if not self._bank:
            self._control  # noqa: B018 (builds)
            built = self.snapshot()
            for seed in range(self.spec.placements):
                self._place(seed)
                poses = {"body_pos": self.model.body_pos.copy(), "body_quat": self.model.body_quat.copy()}
                self._bank.append(replace(built, **poses))
        draw = int(np.random.SeedSequence([7, *key]).generate_state(1)[0])
        return self._bank[draw % len(self._bank)]

    def reset(self, init_state: np.ndarray, key: tuple[int, ...] = (0,)) -> None:
        """Starts an episode: reset (placement drawn by `key`), `init_state` [1 + nq + nv], settle steps. No image is made."""
        self.restore(self._fixtures(key))
        self.episode = key
        with quiet():
            self._control.set_state(self._checked(init_state))
            self._control.env.sim.forward()
            self._control._post_process()
        for i in range(SETTLE_STEPS):
            self.step(SETTLE_ACTION, sample=i == SETTLE_STEPS - 1)
        self.steps = 0

    def _checked(self, init_state: np.ndarray) -> np.ndarray:
        """`init_state` as float64. Raises UserError when it cannot be one of this task: MuJoCo would read past its end."""
        state = np.asarray(init_state, dtype=np.float64)
        size = 1 + self.model.nq + self.model.nv
        if state.shape != (size,):
            raise UserError(
                f"an initial state of {self.task.name} is [{size}] numbers (time, qpos, qvel), not {list(state.shape)}"
            )
        if not np.isfinite(state).all():
            raise UserError(f"initial state of {self.task.name} has numbers that are not finite")
        if np.abs(state[1:]).max() > LARGEST:  # MuJoCo's solver may fail on them, which ends the process
            raise UserError(f"initial state of {self.task.name} has numbers beyond {LARGEST:g} (m, rad, m/s, rad/s)")
        return state

    def sample_state(self, seed: int) -> np.ndarray:
        """[1 + nq + nv] float64: an initial state drawn from the task's own placement regions, at rest, keyed by `seed`."""
        self.restore(self._fixtures((0,)))
        self._place(seed)
        state = np.array(self._control.get_sim_state())
        state[0], state[1 + self.model.nq :] = 0.0, 0.0
        return state

    @property
    def where(self) -> str:
        """This moment, for messages."""
        episode = f", episode {self.episode}" if self.episode else ""
        return f"control step {self.steps} of {self.spec.suite} task {self.spec.task_id} ({self.task.name}){episode}"

    # ---- stepping
    def step(self, action: np.ndarray, sample: bool = False) -> bool:
        """One control step (50 ms) of `action` [7] in [-1, 1]; returns whether the goal holds. `sample`: look() follows.

        Raises ValueError for an action that is none, and FloatingPointError when the controller's matrices became singular
        or MuJoCo warned: it reset a diverged state behind our back, or contacts or constraints overflowed its arena.
        """
        action = np.asarray(action)
        check_action(action, self.where)
        self._observation = {}
        env, data = self._control.env, self.data
        before = data.time
        try:
            self._stepper.step(action, self.observe if sample else None)
        except np.linalg.LinAlgError as error:
            raise FloatingPointError(f"the arm's state diverged ({error}) at {self.where}") from error
        if data.warning.number.any() or not data.time > before:  # a state with NaN is reset silently, time included
            raise FloatingPointError(f"{_warnings(data)} at {self.where}")
        self.steps += 1
        env._post_process()
        return bool(env._check_success())

    def observe(self) -> None:
        """Takes the observation now (what `step(sample=True)` does at robosuite's own instant); for restored states."""
        state = self.robot_state()
        self._observation = {STATE_KEY: state}
        if self.spec.image_size > 0:
            self._observation |= {key: self.render(camera) for key, camera in CAMERAS.items()}

    def look(self) -> dict[str, np.ndarray]:
        """The observation that the last `step(..., sample=True)` or `reset` took: two images [H, W, 3] uint8, state [8]."""
        if not self._observation:
            raise RuntimeError("look() needs step(action, sample=True) or reset() right before it")
        return self._observation

    def robot_state(self) -> np.ndarray:
        """[8] float32: eef position (m), axis-angle (rad), two gripper joints (m)."""
        ids, d = self.indices, self.data
        quat = d.xquat[ids["hand"]][[1, 2, 3, 0]]
        return np.concatenate([d.site_xpos[ids["grip_site"]], axis_angle(quat), d.qpos[ids["gripper_qpos"]]]).astype(np.float32)

    def render(self, camera: str = "agentview", size: int | None = None) -> np.ndarray:
        """[size, size, 3] uint8 of `camera`, LIBERO's 180-degree rotation applied. The renderer is kept."""
        model = self.model
        if self._renderer is None:
            from sim.render import CameraRenderer

            self._renderer = CameraRenderer(model, self._pictures, self.spec.lod_mm, self.spec.multisample)
        return self._renderer.render(model, self.data, camera, size or self.spec.image_size)

    def close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def close(self) -> None:
        self.close_renderer()
        if "_control" in self.__dict__:
            self._control.close()
            del self.__dict__["_control"]

    # ---- snapshots
    def snapshot(self) -> Snapshot:
        """The full state. With an observation in it when one was just made, so that a branch starts from the same look."""
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, self.data, physics, kind)
        model, memory = self.model, self._stepper.memory()
        poses = model.body_pos.copy(), model.body_quat.copy()
        return Snapshot(physics, *poses, memory, dict(self._observation), self.steps, self._names)

    def restore(self, snapshot: Snapshot) -> None:
        """Back to `snapshot`. What follows is bit-equal to what followed it. Raises UserError for another task's."""
        import mujoco

        size = mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_INTEGRATION)
        if len(snapshot.physics) != size or len(snapshot.body_pos) != self.model.nbody:
            raise UserError(
                f"a snapshot of {len(snapshot.physics)} numbers and {len(snapshot.body_pos)} bodies is no state of "
                f"{self.task.name}, which has {size} and {self.model.nbody}"
            )
        if snapshot.model not in (0, self._names):  # suites have many tasks of one size with other objects
            raise UserError(f"a snapshot of a model with other bodies or joints is no state of {self.task.name}")
        self.model.body_pos[:], self.model.body_quat[:] = snapshot.body_pos, snapshot.body_quat
        mujoco.mj_setState(self.model, self.data, snapshot.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        self.data.warning.number[:] = 0
        self.derive()
        self._stepper.set_memory(snapshot.memory)
        self.steps, self._observation = snapshot.steps, dict(snapshot.observation)
        self._control.env._post_process()

    @cached_property
    def _names(self) -> int:
        """Checksum of the names of the model's bodies and joints, which come first among all names."""
        return zlib.crc32(self.model.names[: self.model.name_geomadr[0]])

    def derive(self) -> None:
        """Brings poses and velocities up to date with the joints: after a step they lag one substep, as in robosuite.

        Does not change what follows: the next substep begins by computing them.
        """
        import mujoco

        for stage in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_comVel):
            stage(self.model, self.data)

    # ---- privileged state
    @property
    def has_look(self) -> bool:
        return bool(self._observation)

    @property
    def indices(self) -> dict:
        """Indices into mjModel and mjData by name; remade when a hard reset compiled a new model."""
        env = self._control.env
        if getattr(self, "_ids_of", None) is not env.sim.model:
            robot, m = env.robots[0], self.model
            objects = {name: int(env.obj_body_id[name]) for name in (*env.objects_dict, *env.fixtures_dict)}
            movable = {}
            for name in env.objects_dict:
                joint = m.body_jntadr[objects[name]]
                movable[name] = (int(m.jnt_qposadr[joint]), int(m.jnt_dofadr[joint]))
            arm = {*robot._ref_joint_pos_indexes, *robot._ref_gripper_joint_pos_indexes}
            hinges = {
                m.joint(j).name: (int(m.jnt_qposadr[j]), int(m.jnt_dofadr[j]))
                for j in range(m.njnt)
                if m.jnt_type[j] != 0 and int(m.jnt_qposadr[j]) not in arm
            }
            self._ids_cache = {
                "grip_site": robot.eef_site_id,
                "hand": m.body(robot.robot_model.eef_name).id,
                "arm_qpos": np.array(robot._ref_joint_pos_indexes),
                "gripper_qpos": np.array(robot._ref_gripper_joint_pos_indexes),
                "gripper_qvel": np.array(robot._ref_gripper_joint_vel_indexes),
                "objects": objects,
                "movable": movable,
                "joints": hinges,
                "regions": {name: m.site(name).id for name in env.object_sites_dict},
                "goal": tuple(tuple(str(w) for w in g) for g in env.parsed_problem["goal_state"]),
            }
            self._ids_of = env.sim.model
        return self._ids_cache

    def privileged(self) -> View:
        """Everything that is true about the present state (see sim.view)."""
        ids, d, m = self.indices, self.data, self.model
        site, hand = ids["grip_site"], ids["hand"]
        return View(
            eef_pos=d.site_xpos[site].copy(),
            eef_quat=d.xquat[hand][[1, 2, 3, 0]],
            eef_mat=d.site_xmat[site].reshape(3, 3).copy(),
            gripper_qpos=d.qpos[ids["gripper_qpos"]],
            gripper_qvel=d.qvel[ids["gripper_qvel"]],
            objects={
                name: Pose(d.xpos[b].copy(), d.xquat[b][[1, 2, 3, 0]], d.xmat[b].reshape(3, 3).copy())
                for name, b in ids["objects"].items()
            },
            regions={
                name: Region(d.site_xpos[s].copy(), d.site_xmat[s].reshape(3, 3).copy(), m.site_size[s].copy())
                for name, s in ids["regions"].items()
            },
            joints={name: float(d.qpos[q]) for name, (q, _) in ids["joints"].items()},
            goal=ids["goal"],
            satisfied=tuple(bool(self._control.env._eval_predicate(list(g))) for g in ids["goal"]),
        )
