"""Who plays in a training run: the policy over the grammar, or a chat model. To the loop both are groups of rollouts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from text_agents.autoresearch.rollouts import Judge, ResearchTask, roll
from text_agents.autoresearch.sandbox import Limits
from text_agents.autoresearch.spec_policy import SpecPolicy
from text_agents.autoresearch.train_config import ResearchTrainConfig
from text_agents.deferred import Deferred
from vla_wmrl.types import Source, Start


class SpecPlayer:
    """The small network over the grammar's choices."""

    threaded = True  # its real trajectories run beside the imagined ones

    def __init__(self, cfg: ResearchTrainConfig, tasks: Sequence[ResearchTask]):
        self.tasks, self.turns = tasks, cfg.turns
        self.policy = SpecPolicy.load(cfg.policy.path) if cfg.policy.path else SpecPolicy(cfg.policy.width, cfg.seed)

    def play(self, judge: Judge, starts: Sequence[Start], size: int, seed: Sequence[int], source: Source) -> list[tuple]:
        return roll(self.policy, self.tasks, starts, size, seed, judge, self.turns, source)

    def now(self) -> SpecPlayer:
        """With the present weights, whatever becomes of the policy meanwhile."""
        then = copy.copy(self)
        then.policy = copy.deepcopy(self.policy)
        return then


class ChatPlayer:
    """A causal language model that writes specifications, or whole programs."""

    threaded = False  # one network on one device: it writes for both, in turns

    def __init__(self, cfg: ResearchTrainConfig, tasks: Sequence[ResearchTask], limits: Limits):
        """Raises UserError without such a model, or where its context is shorter than a conversation may be."""
        from text_agents.language_policy import LanguagePolicy, check_context

        self.tasks, self.turns, self.limits, self.cfg = tasks, cfg.turns, limits, cfg.chat
        section = cfg.chat.model
        self.policy = LanguagePolicy.from_pretrained(
            cfg.policy.path or section.path, device=section.device, temperature=section.temperature,
            lora_rank=cfg.chat.lora.rank, lora_alpha=cfg.chat.lora.alpha, lora_targets=cfg.chat.lora.targets,
            template=section.template, seed=cfg.seed,
        )  # fmt: skip
        check_context(self.policy, section, "chat.model")

    def play(self, judge: Judge, starts: Sequence[Start], size: int, seed: Sequence[int], source: Source) -> list[tuple]:
        from text_agents.autoresearch.chat_rollouts import roll_chat

        section = self.cfg.model
        return roll_chat(
            self.policy, self.tasks, starts, size, seed, judge, self.turns, source, mode=self.cfg.mode, limits=self.limits,
            max_new_tokens=section.max_new_tokens, max_prompt_tokens=section.max_prompt_tokens, batch=self.cfg.batch,
        )  # fmt: skip


def make_player(cfg: ResearchTrainConfig, tasks: Sequence[ResearchTask], limits: Limits) -> SpecPlayer | ChatPlayer:
    return ChatPlayer(cfg, tasks, limits) if cfg.policy.kind == "chat" else SpecPlayer(cfg, tasks)


class Roller:
    """Groups of trajectories by one judge, as the loop asks for them."""

    def __init__(self, player: SpecPlayer | ChatPlayer, judge: Judge, source: Source, late: bool = False):
        """late: real groups run on while the policy trains, so they keep the policy that they were called with."""
        self.player, self.judge, self.source, self.late = player, judge, source, late
        self.thread = ThreadPoolExecutor(1) if source == "real" and player.threaded else None

    def groups(self, starts: Sequence[Start], size: int, seed: Sequence[int], player: Any = None) -> list[tuple]:
        return (player or self.player).play(self.judge, starts, size, seed, self.source)

    def __call__(self, starts: Sequence[Start], size: int, seed: Sequence[int]) -> Future | list[tuple]:
        """A future of the real groups, which run while the others are imagined; the imagined groups themselves."""
        if self.source == "imagined":
            return self.groups(starts, size, seed)
        if self.thread is None:
            return Deferred(lambda: self.groups(starts, size, seed))
        return self.thread.submit(self.groups, starts, size, seed, self.player.now() if self.late else None)

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown(wait=True, cancel_futures=True)
