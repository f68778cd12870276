"""The world model beside the simulator: built for the tasks of a run, fed with what was executed, asked for groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.libero import EnvSpec, LiberoEnv
from sim.rewards import passes
from sim.rollout import Trace
from sim.state import StateSpec, state_spec
from sim.workers import Context, Pool
from vla_wmrl.config import TrainConfig
from vla_wmrl.policies.base import Policy
from vla_wmrl.types import Rollout, Start
from vla_wmrl.world_model.base import TaskSpec
from vla_wmrl.world_model.latent import StateSpaceModel

PAID = "data.json"  # beside a fitted world model: {"real_steps": control steps that its training data cost, "what": ...}


@dataclass(frozen=True)
class StateSpecJob:
    """Asks a worker, which has the simulator, for a task's state layout and its instruction."""

    spec: EnvSpec

    @property
    def affinity(self) -> tuple:
        return (self.spec,)

    def run(self, context: Context) -> tuple[StateSpec, str]:
        env = context.keep(("env", self.spec), lambda: LiberoEnv(self.spec))
        return state_spec(env), env.task.language


def task_specs(pool: Pool, specs: dict[int, EnvSpec]) -> dict[int, TaskSpec]:
    """What a world model has to know of each task, read off the simulator."""
    found = pool.map([StateSpecJob(spec) for spec in specs.values()])
    return {
        task: TaskSpec(
            task_id=task, language=language, layout={k: (s.start, s.stop) for k, s in spec.layout.items()},
            objects=spec.objects, fixtures=spec.fixtures, joints=spec.joints, goal=spec.goal,
        )
        for task, (spec, language) in zip(specs, found, strict=True)
    }  # fmt: skip


class WorldModelRuntime:
    """Groups imagined by the world model: the loop's `Imagination`. Keeps the real data it was shown, for resuming."""

    def __init__(self, cfg: TrainConfig, tasks: dict[int, TaskSpec], policy: Policy):
        self.cfg, self.policy = cfg, policy
        section = cfg.world_model
        self.model = (
            StateSpaceModel.from_pretrained(section.path, tasks, cfg.seed) if section.path else StateSpaceModel(tasks, cfg.seed)
        )
        self.traces: list[dict] = []
        self.looks: list[dict] = []
        paid = Path(section.path, PAID) if section.path else None
        self.real_steps = json.loads(paid.read_text())["real_steps"] if paid and paid.exists() else 0

    def __call__(self, starts: Sequence[Start], group_size: int, seed: tuple[int, ...]) -> list[tuple[Rollout, ...]]:
        """One tuple of `group_size` imagined rollouts per start; noise keys as in real execution."""
        every, branch = [s for s in starts for _ in range(group_size)], self.cfg.groups.kind == "branch"
        members = list(range(group_size)) * len(starts)
        rollouts = self.model.imagine(
            self.policy,
            every,
            members,
            seed,
            self.cfg.groups.looks,
            explore_looks=self.cfg.groups.explore_looks if branch else None,
            until=self._decided if branch and self.cfg.groups.reward == "next" else None,
        )
        return [tuple(rollouts[i : i + group_size]) for i in range(0, len(rollouts), group_size)]

    def _decided(self, start: Start, progress: float) -> bool:
        return passes(start, progress, len(self.model.tasks[start.task_id].goal))

    def observe(self, traces: Sequence[Trace], rollouts: Sequence[Rollout]) -> None:
        """Real trajectories to learn from, and real looks (states with the features that were seen there)."""
        self._observe([dict(t.__dict__) for t in traces], [{"task_id": r.start.task_id, "states": r.states[:-1],
                      "features": r.inputs["features"]} for r in rollouts])  # fmt: skip

    def _observe(self, traces: list[dict], looks: list[dict]) -> None:
        self.model.observe([Trace(**t) for t in traces], "policy")
        for seen in looks:
            self.model.decoder.observe(int(seen["task_id"]), seen["states"], seen["features"])
        self.traces += traces
        self.looks += looks

    def fit(self) -> dict[str, float]:
        """The first fit: the dynamics unless they came fitted, and the decoder of this policy's features."""
        section = self.cfg.world_model
        losses = self.model.fit(section.fit_steps) if section.path is None else {}
        if section.decoder_steps:
            self.model.fit_decoder(self.policy, section.decoder_steps)
        return losses

    def refit(self) -> dict[str, float]:
        """A short fit on the grown data."""
        return self.model.fit(self.cfg.world_model.refit_steps)

    def state_dict(self) -> dict:
        return {"model": self.model.state_dict(), "traces": self.traces, "looks": self.looks}

    def load_state_dict(self, state: dict) -> None:
        self._observe(state["traces"], state["looks"])
        self.model.load_state_dict(state["model"])
