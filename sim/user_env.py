"""Any environment of yours in our rollouts and worker pools: six methods, and a spec that says where they are.

Non-obvious behaviour
* Rollouts run side by side in one environment by `save` and `load` between looks, so both must hold everything that decides
  what follows (mjSTATE_INTEGRATION, the controller's memory, whatever the model's reset changed), without handles.
* An adapter is made at first use, in the worker that uses it. Its module must be importable there.
* There are no milestones: progress is 0 until success, and the state of a look is its `observation.state`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from sim.gl import robosuite_import_env, setup_gl
from sim.protocol import STATE_KEY, check_action
from vla_wmrl.errors import UserError, require
from vla_wmrl.types import Start


class Adapter(Protocol):
    """What you write. Its constructor gets the spec's arguments."""

    def reset(self, init_id: int, seed: int) -> None:
        """Starts an episode: initial state `init_id` of yours; `seed` decides all else that is random."""

    def step(self, action: np.ndarray) -> bool:
        """One control step; returns whether the task is done."""

    def look(self) -> dict[str, np.ndarray]:
        """What the policy sees now: `observation.images.*` [H, W, 3] uint8 and `observation.state` float32."""

    def save(self) -> dict[str, np.ndarray]:
        """The full state."""

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Back to a full state; what follows is equal to what followed it."""

    def close(self) -> None:
        """Lets go of everything."""


@dataclass(frozen=True)
class UserSpec:
    """One task of your own, in place of sim.libero.EnvSpec. Names and numbers only, so it pickles.

    `adapter`: "module:Class". `arguments`: of its constructor (a dict becomes sorted pairs). `language`: the instruction.
    `max_steps`: control steps of an episode. `task_id` tells several tasks of one run apart.
    """

    adapter: str
    arguments: Any = ()
    language: str = ""
    max_steps: int = 200
    task_id: int = 0

    def __post_init__(self) -> None:
        require(self.adapter.count(":") == 1, f"adapter={self.adapter!r} is not of the form module:Class")
        require(self.max_steps > 0, f"max_steps={self.max_steps} must be positive")
        if isinstance(self.arguments, Mapping):
            object.__setattr__(self, "arguments", tuple(sorted(self.arguments.items())))

    def build(self) -> UserEnv:
        return UserEnv(self)

    def row(self) -> dict[str, Any]:
        """What every result's row says about the environment."""
        return {"suite": self.adapter, "task_id": self.task_id, **dict(self.arguments)}


@dataclass(frozen=True)
class UserSnapshot:
    state: dict[str, np.ndarray]
    observation: dict[str, np.ndarray] = field(default_factory=dict)
    steps: int = 0


class UserEnv:
    """An Adapter with what rollouts ask of sim.libero.LiberoEnv: counted steps, announced looks, snapshots."""

    def __init__(self, spec: UserSpec):
        self.spec, self.task, self.max_steps = spec, spec, spec.max_steps
        self.steps = 0
        self.episode: tuple[int, ...] = ()
        self._observation: dict[str, np.ndarray] = {}

    @cached_property
    def adapter(self) -> Adapter:
        module, name = self.spec.adapter.split(":")
        setup_gl()
        with robosuite_import_env():
            try:
                found = getattr(importlib.import_module(module), name)
            except (ModuleNotFoundError, AttributeError) as error:
                raise UserError(f"no adapter {self.spec.adapter}: {error}") from error
            return found(**dict(self.spec.arguments))

    def start(self, start: Start) -> None:
        """Starts the episode that `start` names, and looks."""
        key = [*start.split.encode(), start.task_id, start.init_id, start.episode]
        self.adapter.reset(start.init_id, int(np.random.SeedSequence(key).generate_state(1)[0]))
        self.steps, self.episode = 0, start.key
        self.observe()

    def step(self, action: np.ndarray, sample: bool = False) -> bool:
        action = np.asarray(action)
        where = f"control step {self.steps} of {self.spec.adapter}, episode {self.episode}"
        check_action(action, where, action.shape)  # how many numbers it takes, only the adapter knows
        self._observation = {}
        success = bool(self.adapter.step(action))
        self.steps += 1
        if sample:
            self.observe()
        return success

    def observe(self) -> None:
        look = self.adapter.look()
        require(STATE_KEY in look, f"{self.spec.adapter}.look() has no {STATE_KEY!r}, only {sorted(look)}")
        self._observation = {key: np.asarray(value) for key, value in look.items()}

    @property
    def has_look(self) -> bool:
        return bool(self._observation)

    def measure(self) -> tuple[np.ndarray, float]:
        """(state, progress) for records: the robot state of a look at this moment, and nothing known about progress."""
        return np.asarray(self.adapter.look()[STATE_KEY], dtype=np.float32), 0.0

    def render(self, camera: str = "", size: int = 0) -> np.ndarray:
        """The first image of a look at this moment, for videos, at the size it has."""
        return next(image for key, image in self.adapter.look().items() if key != STATE_KEY)

    def snapshot(self) -> UserSnapshot:
        return UserSnapshot(self.adapter.save(), dict(self._observation), self.steps)

    def restore(self, snapshot: UserSnapshot) -> None:
        self.adapter.load(snapshot.state)
        self.steps, self._observation = snapshot.steps, dict(snapshot.observation)

    def close(self) -> None:
        if "adapter" in self.__dict__:
            self.adapter.close()
            del self.__dict__["adapter"]
