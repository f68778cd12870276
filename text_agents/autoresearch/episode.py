"""Trajectories: an agent gets a task, acts, reads what became of it, and acts again, up to four turns (WMRL 2.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from text_agents.autoresearch import scoring
from text_agents.autoresearch.execute import Executed, Mode, brief, execute
from text_agents.autoresearch.pipeline import choices, neighbours, parse, sample, sample_sound
from text_agents.autoresearch.render import Facts, code_facts, facts_of
from text_agents.autoresearch.sandbox import Limits, Sandbox
from text_agents.autoresearch.tasks import Task

TURNS = 4
OBSERVATION_CHARS, OVERVIEW_CHARS = 3000, 1500


@dataclass
class Trajectory:
    """One trajectory: the agent's texts and what became of them. `reward`: the best turn's, NaN if none was graded."""

    task: str
    member: int
    texts: list[str] = field(default_factory=list)
    turns: list[Executed] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return scoring.trajectory_reward([t.reward for t in self.turns])

    @property
    def percentile(self) -> float:
        """Best HumanRank in percent; 0 where graded turns were all invalid, NaN where none was graded."""
        ranks = [100 * t.rank for t in self.turns if t.status == "valid"]
        graded = any(t.status != "ungraded" for t in self.turns)
        return max(ranks) if ranks else (0.0 if graded else float("nan"))

    @property
    def sandbox_s(self) -> float:
        return sum(t.sandbox_s for t in self.turns)


class Agent(Protocol):
    """Anything that writes. One call for all members of a group, so that a model can batch them."""

    def act(self, prompt: str, histories: Sequence[Trajectory], kind: str) -> list[str]: ...


def prompt(task: Task, facts: Facts, mode: Mode, limits: Limits) -> str:
    """The first message to an agent. What follows alternates its texts and `observation`s."""
    if mode == "pipeline":
        values = "\n".join(f"  {name}: {', '.join(options)}" for name, options in choices(facts.kind).items())
        form = f"Answer with one JSON object, a pipeline specification. Keys and values:\n{values}\n"
        form += '  params: of the model, e.g. {"max_iter": 100}'
    else:
        form = "Answer with one Python program in a fenced block."
    text = task.description[:OVERVIEW_CHARS]
    data = task.inventory(limit=OVERVIEW_CHARS)
    return f"# Task {task.name}\n{text}\n\n# Data\n{data}\n\n# Sandbox\n{brief(limits)}\n\n{form}\n"


class Told(Protocol):
    """What an agent is told of a turn."""

    status: str
    feedback: str


def observation(turn: Told) -> str:
    """What the agent reads after a turn. Masked from the loss: it did not write it."""
    return f"[{turn.status}] {turn.feedback}"[:OBSERVATION_CHARS]


def run_group(
    task: Task, agent: Agent, size: int, sandbox: Sandbox, mode: Mode = "pipeline", turns: int = TURNS
) -> list[Trajectory]:
    """`size` trajectories of one task, turn by turn, so that each turn's programs run in parallel."""
    facts = facts_of(task) if mode == "pipeline" else code_facts(task)
    first = prompt(task, facts, mode, sandbox.limits)
    group = [Trajectory(task.name, member) for member in range(size)]
    for _ in range(turns):
        texts = agent.act(first, group, facts.kind)
        for trajectory, text, turn in zip(group, texts, execute(task, facts, texts, mode, sandbox), strict=True):
            trajectory.texts.append(text)
            trajectory.turns.append(turn)
    return group


class SpecAgent:
    """Agents without a model, for comparison: "random" draws any specification, "sound" leaves out known mistakes,
    "search" starts sound and then changes one choice of its best turn. Every text depends on (seed, task, member,
    turn) alone."""

    def __init__(self, kind: str, seed: int = 0):
        self.kind, self.seed = kind, seed

    def act(self, prompt: str, histories: Sequence[Trajectory], kind: str) -> list[str]:
        labels = "accuracy" in prompt.split("# Data", maxsplit=1)[0] or "f1" in prompt.split("# Data", maxsplit=1)[0]
        return [self._one(h, kind, labels) for h in histories]

    def _one(self, history: Trajectory, kind: str, labels: bool) -> str:
        key = [self.seed, int.from_bytes(history.task.encode()[-8:], "big"), history.member, len(history.turns)]
        rng = np.random.default_rng(key)
        if self.kind == "random":
            return sample(kind, rng).to_json()
        rewards = [-1.0 if np.isnan(t.reward) else t.reward for t in history.turns]
        if self.kind == "search" and rewards:
            near = list(neighbours(parse(history.texts[int(np.argmax(rewards))], kind)))
            return near[rng.integers(len(near))].to_json()
        return sample_sound(kind, rng, labels).to_json()
