"""Several LIBERO tasks as one `gymnasium.vector.VectorEnv`, in this process or one process each.

gymnasium's own SyncVectorEnv and AsyncVectorEnv run the environments. Added here: everything is checked before any
environment moves, a process that dies or hangs becomes an error that names its environment, and nothing outlives close().
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from sim.gl import setup_gl
from sim.gym_env import OPTIONS, LiberoGymEnv, resolve
from sim.libero import EnvSpec
from sim.protocol import CONTROL_HZ, check_action
from sim.workers import WorkerError, WorkerTimeout, one_thread_each
from vla_wmrl.errors import nearest, require


class LiberoVectorEnv(VectorEnv):
    """`specs`, one environment each (they may be different tasks, with one `image_size`). Spaces and infos: LiberoGymEnv.

    `processes`: one spawned process an environment, so a script needs `if __name__ == "__main__"`; otherwise they run one
    after the other in this process. The numbers are the same. `settings` go to LiberoGymEnv (split, max_steps, look_every,
    render_size). `timeout_s` of silence of a process is an error; the first reset builds the simulator.

    Non-obvious behaviour
    * Autoreset is disabled, as `metadata["autoreset_mode"]` says: to step an environment whose episode is over is an error.
      Start its next episode with `reset(options={"reset_mask": over})`, a bool array [num_envs]; the others go on.
    * Options `init_id`, `episode` and `split` are one value for all environments or one for each. A single seed s means
      s, s + 1, ... for the environments, as in gymnasium.
    * After an environment failed in its process, or the process died or hung, the whole is closed: states are gone.
    """

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"], "render_fps": CONTROL_HZ}
    render_mode = "rgb_array"

    def __init__(self, specs: Sequence[EnvSpec], processes: bool = False, timeout_s: float = 300.0, **settings: Any):
        """Raises UserError for settings that mean nothing, and when nothing here can render."""
        require(len(specs) > 0, "no environments: pass at least one EnvSpec")
        require(len({spec.image_size for spec in specs}) == 1, "all environments need the same image_size")
        setup_gl()
        self.num_envs, self.timeout_s, self.split = len(specs), timeout_s, settings.get("split", "official")
        make = [partial(LiberoGymEnv, spec, index, **settings) for index, spec in enumerate(specs)]
        if processes:
            with one_thread_each():
                self.inner = AsyncVectorEnv(make, context="spawn", autoreset_mode=AutoresetMode.DISABLED)
        else:
            self.inner = SyncVectorEnv(make, autoreset_mode=AutoresetMode.DISABLED)
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(self.inner, name))
        self._started = np.zeros(self.num_envs, dtype=bool)
        self._over = np.zeros(self.num_envs, dtype=bool)
        self._steps = np.zeros(self.num_envs, dtype=int)

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the inner environment. Raises WorkerError or WorkerTimeout when a process does not answer."""
        if self.closed:
            raise ClosedEnvironmentError("this LiberoVectorEnv is closed: make another")
        if isinstance(self.inner, SyncVectorEnv):
            return getattr(self.inner, name)(*args, **kwargs)
        try:
            getattr(self.inner, f"{name}_async")(*args, **kwargs)
            return getattr(self.inner, f"{name}_wait")(timeout=self.timeout_s)
        except multiprocessing.TimeoutError:
            silent = [i for i, pipe in enumerate(self.inner.parent_pipes) if not pipe.poll()]
            self._abandon()
            raise WorkerTimeout(f"the process of env {silent} was silent for {self.timeout_s:g} s in {name}") from None
        except (EOFError, ConnectionError) as error:
            for process in self.inner.processes:
                process.join(timeout=0.2)  # the pipe closes a moment before the process is gone
            dead = {i: p.exitcode for i, p in enumerate(self.inner.processes) if not p.is_alive()}
            self._abandon()
            raise WorkerError(f"the process of env {list(dead)} died in {name} (exit codes {list(dead.values())})") from error
        except Exception:  # raised by an environment, whose process gymnasium has ended
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Ends all processes without waiting for answers: what they hold, the system takes back."""
        for process in self.inner.processes:
            process.kill()
            process.join()
        for pipe in self.inner.parent_pipes:
            if pipe is not None:
                pipe.close()
        self.inner.closed = self.closed = True

    def _each(self, name: str, value: Any) -> list[Any]:
        """`value` of an option for every environment."""
        if isinstance(value, str) or np.ndim(value) == 0:
            return [value] * self.num_envs
        require(len(value) == self.num_envs, f"option {name!r} has {len(value)} values for {self.num_envs} environments")
        return list(value)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict, dict[str, Any]]:
        """Starts episodes: of all environments, or of those where `options["reset_mask"]` holds. Raises UserError."""
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, dtype=bool)))
        require(mask.shape == (self.num_envs,) and mask.dtype == bool, f"reset_mask is a bool array [{self.num_envs}]")
        require(bool(mask.any()), "reset_mask selects no environment")
        for name in options:
            require(name in OPTIONS, f"unknown reset option {name!r}{nearest(name, [*OPTIONS, 'reset_mask'])}")
        if seed is None:
            seeds = [int(n) for n in self.np_random.integers(2**31, size=self.num_envs)]
        elif isinstance(seed, int | np.integer):
            super().reset(seed=int(seed))
            seeds = [int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = self._each("seed", seed)
        values = {name: self._each(name, value) for name, value in options.items()}
        starts = [resolve(seeds[i], {k: v[i] for k, v in values.items()}, self.split) for i in range(self.num_envs)]
        each = {name: [start[name] for start in starts] for name in OPTIONS}
        result = self._ask("reset", seed=seeds, options={**each, "reset_mask": mask})
        self._started |= mask
        self._over &= ~mask
        self._steps[mask] = 0
        return result

    def step(self, actions: np.ndarray) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One control step of every environment; `actions` [num_envs, 7]. Raises ValueError before any of them moves."""
        actions = np.asarray(actions)
        numbers = self._steps + 1
        if actions.ndim == 0 or len(actions) != self.num_envs:
            raise ValueError(f"step {numbers.tolist()}: {self.num_envs} environments take actions [{self.num_envs}, 7], "
                             f"not {list(actions.shape)}")  # fmt: skip
        for i, action in enumerate(actions):
            where = f"env {i}, step {numbers[i]}"
            if not self._started[i]:
                raise RuntimeError(f"{where}: reset() comes before step()")
            if self._over[i]:
                raise RuntimeError(f"{where}: its episode is over; reset it with options={{'reset_mask': ...}}")
            check_action(action, where)
        result = self._ask("step", actions)
        self._steps += 1
        self._over = result[2] | result[3]
        return result

    def call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Method or attribute `name` of every environment."""
        return tuple(self._ask("call", name, *args))

    def render(self) -> tuple[np.ndarray, ...]:
        """One frame [H, W, 3] uint8 an environment (see LiberoGymEnv.render)."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """Closes simulators, ends processes."""
        if hasattr(self, "inner"):
            self._abandon() if isinstance(self.inner, AsyncVectorEnv) else self.inner.close()
