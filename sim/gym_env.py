"""One LIBERO task as a `gymnasium.Env`, on our own LiberoEnv and under its protocol."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from sim.libero import EnvSpec, LiberoEnv, is_count
from sim.protocol import ACTION_SIZE, CAMERAS, CONTROL_HZ, OFFICIAL_STATES, STATE_KEY, check_action
from sim.rollout import begin
from vla_wmrl.config import TRAIN_INITS
from vla_wmrl.errors import UserError, nearest, require
from vla_wmrl.types import Start

STATE_SIZE = 8
SPLITS = {"official": OFFICIAL_STATES, "train": TRAIN_INITS}  # initial states a task
OPTIONS = ("init_id", "episode", "split")
IMAGES = {key.rpartition(".")[2]: key for key in CAMERAS}  # name in the observation -> name in LiberoEnv's look


def resolve(seed: int | None, options: dict[str, Any], split: str) -> dict[str, Any]:
    """The options of one reset with nothing left open: init_id, episode, split. Raises UserError for what does not exist.

    `seed` decides only what the options do not: it is initial state `seed % n` and episode `seed // n` of the split's n
    states, so that seeds 0 to 49 are the benchmark's 50 states, and seeds 50 to 99 the same with other fixture placements.
    """
    for name in options:
        require(name in OPTIONS, f"unknown reset option {name!r}{nearest(name, OPTIONS)}")
    split = options.get("split", split)
    require(split in SPLITS, f"unknown split {split!r}{nearest(split, list(SPLITS))}")
    n = SPLITS[split]
    if "init_id" in options:
        init_id, episode = options["init_id"], options.get("episode", 0)
    else:
        require(seed is not None and seed >= 0, f"seed={seed}: pass a seed from 0 up, or options={{'init_id': ...}}")
        init_id, episode = seed % n, options.get("episode", seed // n)
    for name, value in (("init_id", init_id), ("episode", episode)):
        require(is_count(value), f"{name}={value!r} is not a number from 0 up")
    require(init_id < n, f"init_id={init_id}: the split {split!r} has initial states 0 to {n - 1}")
    return {"init_id": int(init_id), "episode": int(episode), "split": split}


class LiberoGymEnv(gymnasium.Env):
    """One task. The simulator is built at the first reset, in the process that resets.

    Observation: `pixels/image` and `pixels/image2` [H, W, 3] uint8 (left out with `image_size=0`), `agent_pos` [8] float32,
    all as LiberoEnv.look() has them. Action [7] in [-1, 1]; larger ones are clipped by the controller, as in robosuite.
    Reward 1 at success, else 0. `terminated`: success; `truncated`: `max_steps` control steps without it.
    Info: success, init_id, episode, steps (control steps since the start) and looked (whether this observation is new).

    Non-obvious behaviour
    * Cameras cost most of a step, so an observation is made at every `look_every`-th control step, at a reset and at
      truncation; steps between return the one before, with looked=False. Set it to the steps a policy runs of a chunk.
    * `render()` returns the camera image of the last look, at no cost. With `render_size` it renders the present state.
    * `reset()` without a seed draws one from `np_random`; see `resolve` for what a seed means.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": CONTROL_HZ}
    render_mode = "rgb_array"

    def __init__(
        self, spec: EnvSpec, index: int = 0, split: str = "official", max_steps: int | None = None, look_every: int = 1,
        render_size: int | None = None,
    ):  # fmt: skip
        """`index`: of this environment among several, for messages. `max_steps`: control steps, None for the suite's."""
        for name, value in (("look_every", look_every), ("max_steps", max_steps), ("render_size", render_size)):
            own = value is None and name != "look_every"
            require(own or is_count(value, 1), f"{name}={value!r} must be a whole number from 1 up")
        require(split in SPLITS, f"unknown split {split!r}{nearest(split, list(SPLITS))}")
        self.env = LiberoEnv(spec)
        self.index, self.split, self.look_every, self.render_size = index, split, look_every, render_size
        self.max_steps = max_steps or self.env.max_steps
        self.action_space = spaces.Box(-1.0, 1.0, (ACTION_SIZE,), np.float32)
        parts: dict[str, spaces.Space] = {"agent_pos": spaces.Box(-np.inf, np.inf, (STATE_SIZE,), np.float32)}
        if spec.image_size:
            image = spaces.Box(0, 255, (spec.image_size, spec.image_size, 3), np.uint8)
            parts["pixels"] = spaces.Dict(dict.fromkeys(IMAGES, image))
        self.observation_space = spaces.Dict(parts)
        self._start: dict[str, Any] = {}

    def _look(self) -> None:
        look = self.env.look()
        self._observation = {"agent_pos": look[STATE_KEY]}
        if self.env.spec.image_size:
            self._observation["pixels"] = {name: look[key] for name, key in IMAGES.items()}

    def _info(self, success: bool, looked: bool) -> dict[str, Any]:
        start = {name: self._start[name] for name in ("init_id", "episode")}
        return {"success": success, **start, "steps": self.env.steps, "looked": looked}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict[str, Any]]:
        """Starts an episode. `options`: init_id, episode (draws the placement of fixtures), split.

        A list in the options has one value an environment (gymnasium gives all the same options); this one takes its own.
        """
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        mine = {name: value[self.index] if isinstance(value, list) else value for name, value in (options or {}).items()}
        self._start = resolve(seed, mine, self.split)
        start = Start(self.env.spec.task_id, self._start["init_id"], self._start["episode"], split=self._start["split"])
        begin(self.env, start)
        self._look()
        return self._observation, self._info(False, True)

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict[str, Any]]:
        """One control step (50 ms). Raises ValueError for an action that is none, FloatingPointError when MuJoCo diverged."""
        if not self._start:
            raise RuntimeError(f"env {self.index}: reset() comes before step()")
        action = np.asarray(action)
        number = self.env.steps + 1
        check_action(action, f"env {self.index}, step {number}")
        looks = number % self.look_every == 0 or number >= self.max_steps
        try:
            success = self.env.step(action, sample=looks)
        except FloatingPointError as error:
            raise FloatingPointError(f"env {self.index}, step {number}: {error}") from error
        if looks:
            self._look()
        truncated = not success and number >= self.max_steps
        return self._observation, float(success), success, truncated, self._info(success, looks)

    def render(self) -> np.ndarray:
        """[H, W, 3] uint8, the agentview camera."""
        if not self._start:
            raise RuntimeError(f"env {self.index}: reset() comes before render()")
        if self.render_size is not None:
            return self.env.render("agentview", self.render_size)
        if not self.env.spec.image_size:
            raise UserError("image_size=0 makes no images: pass render_size=PIXELS to render")
        return self._observation["pixels"]["image"]

    def close(self) -> None:
        self._start = {}
        self.env.close()
