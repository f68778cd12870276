"""Episodes of a language policy as multi-turn transcripts, in an environment or in a world model: one code path.

A conversation an episode: how it opens (`forms`; in ALFWorld the task, the first observation and, if listed, the commands
that do something); the policy's reply as it was sampled; the next observation; and so on. Tokens are never encoded again,
observations are no rows of the loss.

What is random is keyed by (seed, start, member, turn) alone: a twin in a world model draws the same replies for as long as it
sees the same, and neither the batch nor a resume changes an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from text_agents.alfworld import AlfworldEnv
from text_agents.alfworld_games import Game
from text_agents.language_policy import LanguagePolicy
from text_agents.protocol import Observation, StepResult
from text_agents.rl.config import EpisodesSection
from text_agents.rl.forms import Form, Household
from text_agents.transcripts import StopReason, TokenRollout, Transcript
from vla_wmrl.errors import require
from vla_wmrl.policies.noise import generator
from vla_wmrl.types import Source, Start


@dataclass(frozen=True, kw_only=True)
class EpisodeRollout(TokenRollout):
    """A transcript of K turns, with what the loop, the step-level advantages and the results read of its episode."""

    start: Start
    source: Source
    success: bool
    commands: tuple[str, ...]  # [K]
    observations: tuple[str, ...]  # [K + 1] texts, before each command and after the last
    kinds: tuple[str, ...]  # [K] "invalid", "inefficient", "effective"; in tau2 "call", "say"; "missing": no answer
    score: float | None  # the environment's own reward, without penalties; None: absent
    malformed: int  # replies without the tags that were asked for
    cut: int  # replies that ran into the limit of tokens

    @property
    def steps(self) -> int:
        return len(self.commands)


class World(Protocol):
    """Where B episodes run side by side."""

    source: Source
    form: Form

    def reset(self, starts: Sequence[Start]) -> list[Observation]:
        """Begins one episode a start."""
        ...

    def step(self, rows: Sequence[int], commands: Sequence[str], keys: Sequence[Sequence[int]]) -> list[StepResult]:
        """Carries out a command in each of these episodes; `keys`: for worlds that draw. Reward None at the end: unknown."""
        ...

    def close(self) -> None: ...


class GameWorld:
    """The games themselves. `task_id` of a start is the place of its game in `games`."""

    source: Source = "real"
    form = Household()

    def __init__(self, games: Sequence[Game], max_steps: int):
        self.games, self.max_steps = games, max_steps
        self._envs: list[AlfworldEnv] = []
        self._open: set[int] = set()

    def reset(self, starts: Sequence[Start]) -> list[Observation]:
        self._envs = [AlfworldEnv(self.max_steps) for _ in starts]
        self._open |= {start.task_id for start in starts}
        return [env.reset(self.games[start.task_id]) for env, start in zip(self._envs, starts, strict=True)]

    def step(self, rows: Sequence[int], commands: Sequence[str], keys: Sequence[Sequence[int]]) -> list[StepResult]:
        return [self._envs[row].step(command) for row, command in zip(rows, commands, strict=True)]

    def close(self) -> None:
        """Lets go of the games' tables, megabytes each."""
        for i in self._open:
            self.games[i].release()
        self._envs, self._open = [], set()


@dataclass
class _Growing:
    """An episode that runs."""

    start: Start
    member: int
    seen: Observation
    transcript: Transcript = field(default_factory=Transcript)
    commands: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    malformed: int = 0
    cut: int = 0
    context: list[int] = field(default_factory=list)  # what the policy reads before its next reply
    stop: StopReason = "running"
    score: float = 0.0  # what the environment says at the end

    def finish(self, source: Source, penalty: float) -> EpisodeRollout:
        """Reward: the score, less `penalty` times the share of invalid commands; absent where the world failed."""
        score = None if self.stop == "env_error" else self.score
        success = self.stop == "done" and self.score >= 1.0
        invalid = self.kinds.count("invalid") / len(self.kinds)
        reward = None if score is None else score - penalty * invalid
        base = self.transcript.finish(self.start.init_id, self.member, reward, self.stop)
        return EpisodeRollout(
            **vars(base), start=self.start, source=source, success=success, commands=tuple(self.commands),
            observations=tuple(self.observations), kinds=tuple(self.kinds), malformed=self.malformed, cut=self.cut,
            score=score,
        )  # fmt: skip


def roll(
    policy: LanguagePolicy, world: World, starts: Sequence[Start], size: int, seed: Sequence[int], cfg: EpisodesSection,
    max_new_tokens: int, max_prompt_tokens: int, greedy: bool = False,
) -> list[tuple[EpisodeRollout, ...]]:  # fmt: skip
    """`size` episodes from each start, about `cfg.batch` of them at once.

    max_prompt_tokens: of a transcript before a reply; an episode that exceeds it ends there ("token_limit"), without success.
    Raises UserError where the first prompt does.
    """
    together = max(1, cfg.batch // size)
    groups: list[tuple[EpisodeRollout, ...]] = []
    for first in range(0, len(starts), together):
        some = starts[first : first + together]
        episodes = _Batch(policy, world, some, size, seed, cfg, max_new_tokens, max_prompt_tokens).play(greedy)
        groups += [tuple(episodes[i * size : (i + 1) * size]) for i in range(len(some))]
    return groups


class _Batch:
    """Episodes that run side by side."""

    def __init__(self, policy, world, starts, size, seed, cfg, max_new_tokens, max_prompt_tokens):
        self.policy, self.world, self.size, self.seed, self.cfg = policy, world, size, seed, cfg
        self.max_new_tokens, self.max_prompt_tokens = max_new_tokens, max_prompt_tokens
        every = [(start, member) for start in starts for member in range(size)]
        seen = world.reset([start for start, _ in every])
        self.episodes = [_Growing(start, member, now) for (start, member), now in zip(every, seen, strict=True)]

    def play(self, greedy: bool) -> list[EpisodeRollout]:
        for episode in self.episodes:
            self._begin(episode)
        talk, rows, turn = self.policy.dialogues(greedy), list(range(len(self.episodes))), 0
        while rows:
            episodes = [self.episodes[row] for row in rows]
            keys = [(*self.seed, *e.start.key, e.member, turn) for e in episodes]
            contexts = [e.context for e in episodes]
            copies = self._alike(contexts) if turn == 0 else 1
            replies = talk.reply(contexts[::copies], self.max_new_tokens, [generator(key) for key in keys], copies)
            for episode, reply in zip(episodes, replies, strict=True):
                self._hear(episode, reply)
            results = self.world.step(rows, [e.commands[-1] for e in episodes], keys)
            for episode, reply, result in zip(episodes, replies, results, strict=True):
                self._see(episode, reply.ended, result)
            going = [i for i, episode in enumerate(episodes) if episode.stop == "running"]
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                if rows:
                    talk.keep(going)
            turn += 1
        self.world.close()
        return [episode.finish(self.world.source, self.cfg.invalid_penalty) for episode in self.episodes]

    def _alike(self, contexts: Sequence[list[int]]) -> int:
        """Members begin with the same words, which are read once; unless a user said something else to each of them."""
        first = [contexts[i - i % self.size] for i in range(len(contexts))]
        return self.size if list(contexts) == first else 1

    def _begin(self, episode: _Growing) -> None:
        episode.observations.append(episode.seen.text)
        episode.context = self.policy.chat.render(self.world.form.opening(episode.seen, self.cfg.list_commands))
        n = len(episode.context)
        require(n <= self.max_prompt_tokens, f"an episode's first prompt has {n} tokens, more than {self.max_prompt_tokens}")

    def _hear(self, episode: _Growing, reply) -> None:
        """Takes in what the policy said."""
        episode.transcript.add_context(episode.context)
        episode.transcript.add_reply(reply.token_ids, reply.logp)
        command, well_formed = self.world.form.action_in(self.policy.chat.decode(reply.token_ids))
        episode.commands.append(command)
        episode.malformed += not well_formed
        episode.cut += not reply.ended

    def _see(self, episode: _Growing, reply_ended: bool, result: StepResult) -> None:
        """Takes in what came of the command, and decides whether the episode goes on."""
        now = result.observation
        episode.kinds.append(result.info["kind"])
        episode.observations.append(now.text)
        if result.terminated or result.truncated:
            episode.stop = "done" if result.terminated else "turn_limit"
            if result.reward is None:
                episode.stop = "env_error"
            else:
                episode.score = result.reward
        else:
            text = self.world.form.more(result, self.cfg.list_commands)
            episode.context = self.policy.chat.between("user", text, reply_ended)
            if episode.transcript.room(self.max_prompt_tokens, len(episode.context)) < 0:
                episode.stop = "token_limit"


def describe(rollouts: Sequence[EpisodeRollout]) -> dict[str, float]:
    """Metrics of episodes; {} without any."""
    if not rollouts:
        return {}
    stops = [r.stop_reason for r in rollouts]
    commands = sum(r.steps for r in rollouts)
    return {
        "success": float(np.mean([r.success for r in rollouts])),
        "steps": commands / len(rollouts),
        "tokens": float(np.mean([len(r.token_ids) for r in rollouts])),
        "sampled_tokens": float(np.mean([r.policy_mask.sum() for r in rollouts])),
        "invalid": sum(r.kinds.count("invalid") for r in rollouts) / commands,
        "inefficient": sum(r.kinds.count("inefficient") for r in rollouts) / commands,
        "malformed": sum(r.malformed for r in rollouts) / commands,
        "cut_replies": sum(r.cut for r in rollouts) / commands,
        "token_limit": stops.count("token_limit") / len(stops),
        "no_reward": stops.count("env_error") / len(stops),
    }
