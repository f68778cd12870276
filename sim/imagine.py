"""The world model beside the simulator: built for the tasks of a run, fed with what was executed, asked for groups.

A policy on the CPU imagines in the simulators' workers, after the anchors, on as many cores as they have: on one core a
small policy's forward pass, not the world model, is what imagination waits for. A policy on a GPU imagines where it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from sim.libero import EnvSpec, LiberoEnv
from sim.rewards import passes
from sim.rollout import PolicyRef, Trace
from sim.state import StateSpec, state_spec
from sim.workers import Context, Pool
from vla_wmrl.config import GroupsConfig, TrainConfig
from vla_wmrl.policies.base import Policy
from vla_wmrl.types import Rollout, Start
from vla_wmrl.world_model.base import TaskSpec
from vla_wmrl.world_model.latent import StateSpaceModel

SHARE = 16  # starts a job: enough branches to keep a batch full, few enough to share out evenly
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


class Imagined(Protocol):
    """What is to be imagined of starts: one result a start, whoever else is imagined beside it. Pickles."""

    def __call__(self, model: StateSpaceModel, policy: Policy, starts: Sequence[Start]) -> list[Any]: ...


@dataclass(frozen=True)
class Groups:
    """`size` rollouts per start, a tuple; noise keys as in real execution."""

    size: int
    seed: tuple[int, ...]
    cfg: GroupsConfig
    noisy: bool = True
    look_noise: bool = False

    def __call__(self, model: StateSpaceModel, policy: Policy, starts: Sequence[Start]) -> list[tuple[Rollout, ...]]:
        every, branch = [s for s in starts for _ in range(self.size)], self.cfg.kind == "branch"
        members = list(range(self.size)) * len(starts)

        def decided(start: Start, progress: float) -> bool:
            return passes(start, progress, len(model.tasks[start.task_id].goal))

        rollouts = model.imagine(
            policy, every, members, self.seed, self.cfg.looks, explore_looks=self.cfg.explore_looks if branch else None,
            until=decided if branch and self.cfg.reward == "next" else None, noisy=self.noisy, look_noise=self.look_noise,
        )  # fmt: skip
        return [tuple(rollouts[i : i + self.size]) for i in range(0, len(rollouts), self.size)]


@dataclass(frozen=True)
class ModelRef:
    """A world model by the folder it was saved to. `version` grows whenever it is fitted."""

    path: str
    version: int

    def paths(self) -> dict[str, int]:
        return {self.path: self.version}

    def at(self, here: Mapping[str, str]) -> ModelRef:
        return replace(self, path=here[self.path])

    def reads(self, context: Context) -> list[str]:
        return [] if context.kept.get(("world model",), (None,))[0] == self.version else [self.path]

    def load(self, context: Context) -> StateSpaceModel:
        if self.reads(context):
            context.kept[("world model",)] = self.version, StateSpaceModel.from_pretrained(self.path)
        return context.kept[("world model",)][1]


@dataclass(frozen=True)
class ImagineJob:
    """Imagines in a worker. The starts come without snapshots: nothing is simulated."""

    starts: tuple[Start, ...] = field(repr=False)
    what: Imagined
    policy: PolicyRef
    model: ModelRef

    @property
    def affinity(self) -> tuple:
        return ("imagine",)

    def run(self, context: Context) -> list[Any]:
        return self.what(self.model.load(context), self.policy.load(context), self.starts)


class WorldModelRuntime:
    """Groups imagined by the world model: the loop's `Imagination`. Keeps the real data it was shown, for resuming."""

    def __init__(
        self, cfg: TrainConfig, tasks: dict[int, TaskSpec], policy: Policy, pool: Pool, publish: Callable[[], PolicyRef],
        folder: Path,
    ):  # fmt: skip
        """`publish` names the policy's present weights; `folder` is the run's, where workers find the world model's."""
        self.cfg, self.policy, self.pool, self.publish, self.folder = cfg, policy, pool, publish, folder / "live_world_model"
        self.version = 0  # of what lies in the folder; 0: nothing yet
        section = cfg.world_model
        self.model = (
            StateSpaceModel.from_pretrained(section.path, tasks, cfg.seed) if section.path else StateSpaceModel(tasks, cfg.seed)
        )
        self.traces: list[dict] = []
        self.looks: list[dict] = []
        paid = Path(section.path, PAID) if section.path else None
        self.real_steps = json.loads(paid.read_text())["real_steps"] if paid and paid.exists() else 0

    def __call__(self, starts: Sequence[Start], group_size: int, seed: tuple[int, ...]) -> Future:
        """One tuple of `group_size` rollouts per start."""

        def back(groups: list[tuple[Rollout, ...]]) -> list[tuple[Rollout, ...]]:
            return [tuple(replace(r, start=s) for r in group) for s, group in zip(starts, groups, strict=True)]

        section = self.cfg.world_model
        return self.submit(Groups(group_size, seed, self.cfg.groups, section.noise, section.look_noise), starts, back)

    def submit(self, what: Imagined, starts: Sequence[Start], then: Callable[[list], Any] = lambda results: results) -> Future:
        """A future of `then` of one result per start."""
        bare = tuple(replace(s, snapshot=None) for s in starts)
        if self.cfg.world_model.look_noise and not self.model.decoder.residuals:
            self.model.decoder.keep_residuals()  # looks are observed of the whole episodes that fill the bank of starts alone
        if self.policy.device.type != "cpu":
            done: Future = Future()
            done.set_result(then(what(self.model, self.policy, bare)))
            return done
        if self.version == 0:
            self.model.save(self.folder)
            self.version = 1
        policy, model = self.publish(), ModelRef(str(self.folder), self.version)
        jobs = [ImagineJob(bare[i : i + SHARE], what, policy, model) for i in range(0, len(bare), SHARE)]
        return self.pool.submit(jobs, lambda parts: then([result for part in parts for result in part]))

    def _fitted(self, losses: dict[str, float]) -> dict[str, float]:
        """`losses`, after the workers' copy is out of date."""
        if self.version:
            self.model.save(self.folder)
            self.version += 1
        return losses

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
        return self._fitted(losses)

    def refit(self) -> dict[str, float]:
        """A short fit on the grown data."""
        return self._fitted(self.model.fit(self.cfg.world_model.refit_steps))

    def state_dict(self) -> dict:
        return {"model": self.model.state_dict(), "traces": self.traces, "looks": self.looks}

    def load_state_dict(self, state: dict) -> None:
        self._observe(state["traces"], state["looks"])
        self.model.load_state_dict(state["model"])
        self._fitted({})
