"""`--env.type=vla_wmrl_libero`: the configuration lerobot makes environments from, and the environment as its loop needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import NEW_ROLLOUT_OPTION, _LazyAsyncVectorEnv, freeze_after_episode_end

from sim.gl import setup_gl
from sim.gym_env import ACTION_SIZE, IMAGES, STATE_SIZE, LiberoGymEnv
from sim.libero import EnvSpec
from sim.protocol import CONTROL_HZ
from sim.suites import suite_tasks
from vla_wmrl.errors import require


class LeRobotLibero(LiberoGymEnv):
    """LiberoGymEnv with the names that lerobot's evaluation asks an environment for."""

    def __init__(self, spec: EnvSpec, **settings: Any):
        super().__init__(spec, **settings)
        self.task = self.env.task.name
        self.task_description = self.env.task.language
        self._max_episode_steps = self.max_steps

    def _info(self, success: bool, looked: bool) -> dict[str, Any]:
        return super()._info(success, looked) | {"is_success": success}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict[str, Any]]:
        return super().reset(seed=seed, options={k: v for k, v in (options or {}).items() if k != NEW_ROLLOUT_OPTION})


@EnvConfig.register_subclass("vla_wmrl_libero")
@dataclass
class LiberoConfig(EnvConfig):
    """Tasks of one suite. Seeds choose initial states: lerobot's `--seed=1000` and 50 episodes are the 50 official ones.

    Images come as LIBERO data sets have them (rotated by 180 degrees once), so there is no processor of the environment.
    """

    task: str | None = "libero_10"  # suite
    task_ids: list[int] | None = None  # null: all of the suite
    fps: int = CONTROL_HZ
    episode_length: int | None = None  # control steps; null: the suite's limit
    split: str = "official"  # initial states: official (50 a task) or train (our own)
    image_size: int = 256  # pixels; what the policy was trained on
    stepping: str = "exact"  # exact, near, fast or robosuite (see docs/simulator.md)
    lod_mm: float = 0.0  # level of detail of images; 0: all
    multisample: int = 4  # antialiasing of images
    markers: bool = False  # draw robosuite's marks of the grip site, which LIBERO's images do not have
    look_every: int = 1  # control steps between images; a policy that runs k actions of a chunk needs one in k
    render_size: int | None = None  # pixels of videos; null: what the policy saw, which costs nothing
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.fps == CONTROL_HZ, f"env.fps={self.fps}: LIBERO's controller runs at {CONTROL_HZ} Hz")
        image = PolicyFeature(FeatureType.VISUAL, (self.image_size, self.image_size, 3))
        self.features = {
            "action": PolicyFeature(FeatureType.ACTION, (ACTION_SIZE,)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (STATE_SIZE,)),
            **{f"observation.images.{name}": image for name in IMAGES},
        }
        self.features_map = {name: name for name in self.features} | {"agent_pos": "observation.state"}

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """What one environment is made with, beside its spec."""
        return {"split": self.split, "max_steps": self.episode_length, "look_every": self.look_every,
                "render_size": self.render_size}  # fmt: skip

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, gymnasium.vector.VectorEnv]]:
        """{suite: {task id: vector environment}}, as lerobot's own environments do.

        lerobot goes on stepping environments whose episode is over, which its wrapper freezes: that costs nothing, and
        gymnasium's autoreset has no effect.
        """
        setup_gl()
        tasks = suite_tasks(self.task)
        ids = list(range(len(tasks))) if self.task_ids is None else self.task_ids
        made: dict[int, gymnasium.vector.VectorEnv] = {}
        for task_id in ids:
            spec = EnvSpec(self.task, task_id, self.image_size, self.stepping, self.lod_mm, self.multisample, self.markers)
            one = [partial(LeRobotLibero, spec, index=index, **self.gym_kwargs) for index in range(n_envs)]
            if use_async_envs and n_envs > 1:
                made[task_id] = _LazyAsyncVectorEnv(one)  # as lerobot's do: processes exist while their task runs
            else:
                frozen = [freeze_after_episode_end(make) for make in one]
                made[task_id] = SyncVectorEnv(frozen, autoreset_mode=AutoresetMode.NEXT_STEP)
        return {self.task: made}
