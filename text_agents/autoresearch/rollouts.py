"""Trajectories of the specification policy, in the sandbox or in a world model: one code path, two judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from text_agents.autoresearch import scoring
from text_agents.autoresearch.execute import Mode
from text_agents.autoresearch.pipeline import from_choices
from text_agents.autoresearch.render import Facts, code_facts, facts_of
from text_agents.autoresearch.spec_policy import SpecPolicy, State, task_vector
from text_agents.autoresearch.tasks import Task
from text_agents.autoresearch.vocabulary import MAX_CHOICES
from vla_wmrl.types import Source, Start
from vla_wmrl.world_model.language import REWARDS

_TOKENS, WORLD = 0x5EC1, 0x5EC2  # streams of the random numbers


@dataclass(frozen=True)
class Verdict:
    """What one program came to: reward on the ladder (NaN: ungraded), HumanRank (NaN unless valid).

    seconds: computing time it cost in the sandbox; 0 in a world model. feedback: for agents that read.
    chances: of a world model, how likely each of `language.REWARDS` is [7]; () of what really ran.
    """

    status: scoring.Status
    reward: float
    rank: float
    seconds: float = 0.0
    feedback: str = ""
    chances: tuple[float, ...] = ()


class Judge(Protocol):
    """Decides what becomes of specifications. `keys`: one a text, for judges that draw."""

    def __call__(self, tasks: Sequence[ResearchTask], texts: Sequence[str], keys: Sequence[Sequence[int]]) -> list[Verdict]: ...


@dataclass(frozen=True)
class ResearchTask:
    """A task as rollouts need it. `number`: its task_id."""

    number: int
    task: Task
    facts: Facts
    vector: np.ndarray  # [F]; of tasks for agents that read, [0]
    held_out: bool

    @property
    def name(self) -> str:
        return self.task.name


def prepare(tasks: Sequence[Task], held_out: Sequence[bool], mode: Mode = "pipeline") -> list[ResearchTask]:
    """Tasks with their facts, numbered in this order. Raises UserError for one that specifications do not fit; whole programs
    (mode "code") fit all."""
    found = []
    for number, (task, held) in enumerate(zip(tasks, held_out, strict=True)):
        facts = facts_of(task) if mode == "pipeline" else code_facts(task)
        vector = task_vector(task, facts) if mode == "pipeline" else np.zeros(0, np.float32)
        found.append(ResearchTask(number, task, facts, vector, held))
    return found


class Judged:
    """What is read of a trajectory with K `verdicts`, whoever wrote its programs."""

    start: Start
    texts: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    reward: float | None

    @staticmethod
    def best_of(verdicts: Sequence[Verdict], texts: Sequence[str]) -> float:
        """Reward of a trajectory with programs `texts`: the best graded turn's, NaN without one.

        Of predicted turns, the expectation of the best, as if the outcomes of different programs were independent: the best
        of the expectations is blind to second attempts, and too low for whoever hedges. A program that comes twice has one
        outcome."""
        chances = {text: v.chances for text, v in zip(texts, verdicts, strict=True) if v.chances}
        if not chances:
            return scoring.trajectory_reward([v.reward for v in verdicts])
        at_most = np.prod(np.cumsum(list(chances.values()), axis=1), axis=0)  # P(no program is worth more)
        return float(np.diff(at_most, prepend=0.0) @ REWARDS)

    @property
    def percentile(self) -> float:
        """Best HumanRank in percent; 0 where graded turns were all invalid, NaN where none was graded."""
        if not any(np.isfinite(v.reward) for v in self.verdicts):
            return float("nan")
        return 100.0 * max([v.rank for v in self.verdicts if v.status == "valid"], default=0.0)

    @property
    def success(self) -> bool:
        """Whether any turn was valid."""
        return any(v.status == "valid" for v in self.verdicts)

    @property
    def steps(self) -> int:
        """Programs that were judged."""
        return len(self.verdicts)

    @property
    def seconds(self) -> float:
        return sum(v.seconds for v in self.verdicts)


@dataclass(frozen=True)
class SpecRollout(Judged):
    """One trajectory of K turns, T tokens in all (V tokens in the vocabulary)."""

    start: Start
    member: int
    source: Source
    x: np.ndarray  # [T, INPUTS] float32
    allowed: np.ndarray  # [T, V] bool
    tokens: np.ndarray  # [T] int64
    texts: tuple[str, ...]  # [K] specifications
    verdicts: tuple[Verdict, ...]  # [K]

    @property
    def reward(self) -> float:
        """The best graded turn's, NaN without one."""
        return self.best_of(self.verdicts, self.texts)


def roll(
    policy: SpecPolicy, tasks: Sequence[ResearchTask], starts: Sequence[Start], size: int, seed: Sequence[int], judge: Judge,
    turns: int, source: Source, temperature: float = 1.0,
) -> list[tuple[SpecRollout, ...]]:  # fmt: skip
    """`size` trajectories from each start, turn by turn. The tokens' noise is keyed by (seed, start, member, turn)
    alone, the world model's likewise on a stream of its own."""
    members = [(start, member) for start in starts for member in range(size)]
    own = [tasks[start.task_id] for start, _ in members]
    states = [State(t.vector, t.facts.kind) for t in own]
    samples: list[list] = [[] for _ in members]
    texts: list[list[str]] = [[] for _ in members]
    verdicts: list[list[Verdict]] = [[] for _ in members]
    for turn in range(turns):
        keys = [(*seed, *start.key, member, turn) for start, member in members]
        uniforms = np.array([np.random.default_rng([_TOKENS, *key]).random(MAX_CHOICES) for key in keys])
        drawn = policy.sample(states, uniforms, temperature)
        written = [from_choices(t.facts.kind, s.values).to_json() for t, s in zip(own, drawn, strict=True)]
        judged = judge(own, written, [(WORLD, *key) for key in keys])
        for i, (sample, text, verdict) in enumerate(zip(drawn, written, judged, strict=True)):
            samples[i].append(sample)
            texts[i].append(text)
            verdicts[i].append(verdict)
            states[i].see(sample.tokens, verdict.status, verdict.rank, verdict.reward)
    rollouts = [
        SpecRollout(
            start, member, source, np.concatenate([s.x for s in samples[i]]), np.concatenate([s.allowed for s in samples[i]]),
            np.concatenate([s.tokens for s in samples[i]]), tuple(texts[i]), tuple(verdicts[i]),
        )
        for i, (start, member) in enumerate(members)
    ]  # fmt: skip
    return [tuple(rollouts[i * size : (i + 1) * size]) for i in range(len(starts))]
