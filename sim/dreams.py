"""Starts that nobody simulated: looks of whole episodes that the world model imagined, from initial states that were reset to.

A real episode costs hundreds of control steps and shows one placement of the objects. A run whose groups start in a few dozen
of them learns these placements by heart. A reset costs ten control steps. So imagined groups start where the present policy
comes in the world model's own episodes, from many more placements, and the anchors alone where real episodes came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.imagine import SHARE, WorldModelRuntime
from sim.libero import EnvSpec, LiberoEnv
from sim.rewards import mark, passes_next
from sim.rollout import begin
from sim.starts import BranchStarts
from sim.state import read_state
from sim.workers import Context, Pool
from vla_wmrl.config import TrainConfig
from vla_wmrl.policies.base import Policy
from vla_wmrl.types import Start
from vla_wmrl.world_model.latent import StateSpaceModel

STREAM = 9_999_998  # of the noise key
EVERYTHING = 10**9  # a bank that holds whole dreams drops nothing


@dataclass(frozen=True)
class ResetJob:
    """States [n, S] after resets to `starts` and the settle steps; nothing is rendered."""

    spec: EnvSpec
    starts: tuple[Start, ...] = field(repr=False)

    @property
    def affinity(self) -> tuple:
        return (self.spec,)

    def run(self, context: Context) -> np.ndarray:
        env = context.keep(("env", self.spec), lambda: LiberoEnv(self.spec))
        states = []
        for start in self.starts:
            begin(env, start)
            states.append(read_state(env))
        return np.stack(states)


@dataclass(frozen=True)
class Dream:
    """One imagined episode of K looks: a start for each of them, and progress [K + 1]."""

    starts: tuple[Start, ...]
    progress: np.ndarray
    success: bool
    steps: int


@dataclass(frozen=True)
class Dreams:
    """An undisturbed episode of the policy from every start, which is an initial state."""

    looks: int
    seed: tuple[int, ...]
    noisy: bool = True
    look_noise: bool = False

    def __call__(self, model: StateSpaceModel, policy: Policy, starts: Sequence[Start]) -> list[Dream]:
        dreams = []
        once = [0] * len(starts)
        for r in model.imagine(
            policy, starts, once, self.seed, self.looks, stochastic=False, noisy=self.noisy, look_noise=self.look_noise
        ):
            cut = [
                replace(r.start, look=k, state=r.states[k], progress=float(r.progress[k]), previous=r.previous[k])
                for k in range(r.looks)
            ]
            goals = len(model.tasks[r.start.task_id].goal)
            dreams.append(Dream(tuple(mark(cut, r.progress, goals)), r.progress, r.success, r.steps))
        return dreams


class DreamtStarts:
    """Where imagined groups begin: dreamt anew every `groups.dream_every` updates, by the policy of then. A loop's `Starts`."""

    def __init__(self, cfg: TrainConfig, world: WorldModelRuntime, pool: Pool, conjuncts: Mapping[int, int]):
        """`conjuncts`: of every task's goal."""
        self.cfg, self.world, self.pool, self.conjuncts = cfg, world, pool, conjuncts
        self.initial: dict[int, np.ndarray] = {}  # states [n, S] of every task
        self.bank = BranchStarts(cfg.env.task_ids, cfg.seed, EVERYTHING)
        self.metrics: dict[str, float] = {}
        self.steps = 0  # imagined control steps of the last dreams that nobody has booked yet

    @property
    def init_ids(self) -> list[int]:
        """Training states that the run does not play for real come first."""
        ids, played = self.cfg.env.train_inits, self.cfg.groups.start_episodes
        return [*ids[played:], *ids[:played]][: self.cfg.groups.dream_resets]

    def reset(self, specs: Mapping[int, EnvSpec]) -> int:
        """Resets to the initial states; returns how many resets that were."""
        ids, split = self.init_ids, self.cfg.env.train_split
        parts = [(task, ids[i : i + SHARE]) for task in specs for i in range(0, len(ids), SHARE)]
        found = self.pool.map([ResetJob(specs[task], tuple(Start(task, i, split=split) for i in part)) for task, part in parts])
        for task in specs:
            self.initial[task] = np.concatenate([f for (t, _), f in zip(parts, found, strict=True) if t == task])
        return len(ids) * len(specs)

    def draw(self, step: int, n: int) -> list[Start]:
        """n starts, tasks taking turns."""
        if step % self.cfg.groups.dream_every == 0:
            self._dream(step)
        return self.bank.draw(step, n)

    def _dream(self, step: int) -> None:
        cfg, rng = self.cfg, np.random.default_rng([19, self.cfg.seed, step])
        ids = self.init_ids
        starts = [
            Start(task, ids[i], split=cfg.env.train_split, state=self.initial[task][i])
            for task in cfg.env.task_ids
            for i in rng.choice(len(ids), min(cfg.groups.dream_episodes, len(ids)), replace=False)
        ]
        what = Dreams(cfg.groups.dream_looks, (cfg.seed, step, STREAM), cfg.world_model.noise, cfg.world_model.look_noise)
        dreams: list[Dream] = self.world.submit(what, starts).result()
        self.bank = BranchStarts(cfg.env.task_ids, cfg.seed, EVERYTHING)
        for d in dreams:
            goals = self.conjuncts[d.starts[0].task_id]
            self.bank.extend(d.starts)
            self.bank.observe(d.starts, passes_next(d.progress, goals, cfg.groups.looks))
        self.steps = sum(d.steps for d in dreams)
        self.metrics = {
            "dream/success": float(np.mean([d.success for d in dreams])),
            "dream/progress": float(np.mean([d.progress.max() for d in dreams])),
        }

    def state_dict(self) -> dict:
        return {"initial": self.initial, "bank": self.bank.state_dict(), "metrics": self.metrics}

    def load_state_dict(self, state: dict) -> None:
        self.initial = {int(task): states for task, states in state["initial"].items()}
        self.bank = BranchStarts(self.cfg.env.task_ids, self.cfg.seed, EVERYTHING)
        self.bank.load_state_dict(state["bank"])
        self.metrics = dict(state["metrics"])
