"""Trajectories of a chat model that trains: it writes a program (or a specification), reads what became of it, writes again.

A conversation a trajectory, kept as token ids: what was sampled trains, the task and the observations are masked from the loss
(`transcripts`). In the sandbox or in a world model by the same code, as for the policy over the grammar (`rollouts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from text_agents.autoresearch.episode import observation, prompt
from text_agents.autoresearch.execute import Mode
from text_agents.autoresearch.rollouts import WORLD, Judge, Judged, ResearchTask, Verdict
from text_agents.autoresearch.sandbox import Limits
from text_agents.language_policy import LanguagePolicy
from text_agents.transcripts import StopReason, TokenRollout, Transcript
from vla_wmrl.errors import require
from vla_wmrl.policies.noise import generator
from vla_wmrl.types import Source, Start

AGAIN = "\n\nImprove on it; the best turn counts."


@dataclass(frozen=True, kw_only=True)
class ChatRollout(Judged, TokenRollout):
    """One trajectory of K turns. `reward`: the best graded turn's, None without one."""

    start: Start
    source: Source
    texts: tuple[str, ...]  # [K] replies
    verdicts: tuple[Verdict, ...]  # [K]

    @property
    def member(self) -> int:
        return self.rollout_id


@dataclass
class _Growing:
    """A trajectory that runs."""

    start: Start
    member: int
    task: ResearchTask
    context: list[int]  # what the policy reads before its next reply
    transcript: Transcript = field(default_factory=Transcript)
    texts: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    stop: StopReason = "running"

    def finish(self, source: Source) -> ChatRollout:
        graded = Judged.best_of(self.verdicts, self.texts)
        base = self.transcript.finish(
            self.start.init_id,
            self.member,
            None if graded != graded else graded,
            "done" if self.stop == "running" else self.stop,
        )
        return ChatRollout(
            **vars(base), start=self.start, source=source, texts=tuple(self.texts), verdicts=tuple(self.verdicts)
        )  # fmt: skip


def roll_chat(
    policy: LanguagePolicy, tasks: Sequence[ResearchTask], starts: Sequence[Start], size: int, seed: Sequence[int],
    judge: Judge, turns: int, source: Source, *, mode: Mode, limits: Limits, max_new_tokens: int, max_prompt_tokens: int,
    batch: int = 64,
) -> list[tuple[ChatRollout, ...]]:  # fmt: skip
    """`size` trajectories from each start, about `batch` of them at once.

    max_prompt_tokens: of a conversation before a reply; one that would exceed it ends there, with the turns that it has.
    Raises UserError where a task alone exceeds it. Replies are drawn by (seed, start, member, turn) alone.
    """
    together = max(1, batch // size)
    groups: list[tuple[ChatRollout, ...]] = []
    for first in range(0, len(starts), together):
        some = [
            _begin(policy, tasks, start, size, mode, limits, max_prompt_tokens) for start in starts[first : first + together]
        ]
        every = [episode for group in some for episode in group]
        _play(policy, every, size, seed, judge, turns, max_new_tokens, max_prompt_tokens)
        groups += [tuple(episode.finish(source) for episode in group) for group in some]
    return groups


def _begin(policy, tasks, start, size, mode, limits, max_prompt_tokens) -> list[_Growing]:
    task = tasks[start.task_id]
    ids = policy.chat.render([{"role": "user", "content": prompt(task.task, task.facts, mode, limits)}])
    n = len(ids)
    require(n <= max_prompt_tokens, f"task {task.name} has a prompt of {n} tokens: chat.model.max_prompt_tokens is below that")
    return [_Growing(start, member, task, ids) for member in range(size)]


def _play(policy, episodes: list[_Growing], size: int, seed, judge: Judge, turns: int, max_new: int, max_prompt: int) -> None:
    """Runs trajectories side by side to their ends."""
    talk, rows = policy.dialogues(), list(range(len(episodes)))
    for turn in range(turns):
        going = [episodes[row] for row in rows]
        keys = [(*seed, *e.start.key, e.member, turn) for e in going]
        copies = size if turn == 0 else 1  # members begin with the same words, which are read once
        contexts = [e.context for e in going][::copies]
        replies = talk.reply(contexts, max_new, [generator(key) for key in keys], copies, last=turn == turns - 1)
        texts = [policy.chat.decode(reply.token_ids) for reply in replies]
        verdicts = judge([e.task for e in going], texts, [(WORLD, *key) for key in keys])
        for episode, reply, text, verdict in zip(going, replies, texts, verdicts, strict=True):
            episode.transcript.add_context(episode.context)
            episode.transcript.add_reply(reply.token_ids, reply.logp)
            episode.texts.append(text)
            episode.verdicts.append(verdict)
            episode.context = policy.chat.between("user", observation(verdict) + AGAIN, reply.ended)
            if episode.transcript.room(max_prompt, len(episode.context)) < 0:
                episode.stop = "token_limit"
        kept = [i for i, episode in enumerate(going) if episode.stop == "running"]
        rows = [rows[i] for i in kept]
        if not rows or turn == turns - 1:
            return
        if len(kept) < len(going):
            talk.keep(kept)
