"""A trained specification policy as an `Agent` of `research eval`: on any task, also one with a board of people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from text_agents.autoresearch.episode import Trajectory
from text_agents.autoresearch.pipeline import from_choices, parse, to_choices
from text_agents.autoresearch.spec_policy import SpecPolicy, State
from text_agents.autoresearch.vocabulary import MAX_CHOICES, TOKENS, open_slot

_AGENT = 0xA6E7  # stream of its random numbers


class PolicyAgent:
    """Its texts depend on (seed, task, member, turn) and on what it has read. vectors: {task name: [F]}."""

    def __init__(self, policy: SpecPolicy, vectors: Mapping[str, np.ndarray], seed: int = 0):
        self.policy, self.vectors, self.seed = policy, dict(vectors), seed

    def act(self, prompt: str, histories: Sequence[Trajectory], kind: str) -> list[str]:
        states = [self.state(history, kind) for history in histories]
        keys = [[_AGENT, self.seed, *h.task.encode(), h.member, len(h.turns)] for h in histories]
        uniforms = np.array([np.random.default_rng(key).random(MAX_CHOICES) for key in keys])
        return [from_choices(kind, sample.values).to_json() for sample in self.policy.sample(states, uniforms)]

    def state(self, history: Trajectory, kind: str) -> State:
        """What the policy has seen in a trajectory so far."""
        state = State(self.vectors[history.task], kind)
        for text, turn in zip(history.texts, history.turns, strict=True):
            state.see(tokens_of(text, kind), turn.status, turn.rank, turn.reward)
        return state


def tokens_of(text: str, kind: str) -> tuple[int, ...]:
    """The tokens of a specification."""
    chosen: list = []
    tokens = []
    for value in to_choices(parse(text, kind)):
        _, options = open_slot(kind, chosen)
        tokens.append(next(int(i) for i in options if TOKENS[i][1] == value))
        chosen.append(value)
    return tuple(tokens)
