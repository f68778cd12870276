"""Imitation of the games' own walkthroughs as conversations: a start for models that write no commands of themselves.

A walkthrough knows where things are: it never looks in vain, so whoever imitates it alone does not know how to go on from a
place where the thing is not. `searching` puts such visits before it. Nor does it slip: after the first command that does
nothing, whoever imitates it is where no demonstration was, and stays there. `slipping` puts such commands in between, which
are not imitated: what is learnt is how to go on (noise injection, as in DART, arXiv 1703.09327).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from text_agents.alfworld_games import Game
from text_agents.dialogues import Reply
from text_agents.imitation import imitate
from text_agents.language_policy import LanguagePolicy
from text_agents.order import batch_of
from text_agents.rl.config import TextRlConfig
from text_agents.rl.episodes import EpisodeRollout, GameWorld, roll
from text_agents.rwml import prompts
from vla_wmrl.errors import require
from vla_wmrl.learner import Learner
from vla_wmrl.tracking import Ledger
from vla_wmrl.types import Start


class Teacher:
    """Says a game's walkthrough, in the place of a policy and of its `dialogues.Dialogues`."""

    def __init__(self, policy: LanguagePolicy, plan: Sequence[str]):
        self.chat, self._tokenizer, self._plan = policy.chat, policy.tokenizer, list(plan)

    def dialogues(self, greedy: bool) -> Teacher:
        return self

    def reply(
        self, contexts: Sequence[Sequence[int]], max_new_tokens: int, rngs: Sequence[np.random.Generator], copies: int = 1
    ) -> list[Reply]:
        text = prompts.act_label(self._plan.pop(0) if self._plan else "look")
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.chat.end_id]
        return [Reply(ids, [math.nan] * len(ids), True)]

    def keep(self, rows: Sequence[int]) -> None:
        """One conversation: there is nothing to choose."""


SEARCHES = 3  # places at most that a searching demonstration looks at in vain
SLIPPING_SEARCHES = 6  # and a slipping one, whose conversations are to be as long as a policy's
SLIP = 0.25  # probability that something else is said before a command
WANDER = 0.3  # of slips: a place is gone to that the plan does not ask for


def searching(game: Game, rng: np.random.Generator, most: int = SEARCHES) -> list[str]:
    """The walkthrough, after 0 to `most` visits to places without the kinds of things it takes; closed ones are opened."""
    kinds = {command.split()[1] for command in game.walkthrough if command.startswith("take ")}
    state, _ = game.start()
    others = [c for c in state.commands if c.startswith("go to ") and c not in game.walkthrough]
    visits: list[str] = []
    for place in rng.permutation(others)[: rng.integers(most + 1)]:
        visit = [str(place)]
        there, seen = game.step(state, visit[0])
        opening = visit[0].replace("go to", "open", 1)
        if opening in there.commands:
            visit.append(opening)
            there, seen = game.step(there, opening)
        if not kinds & set(seen.replace(",", "").split()):
            state, visits = there, visits + visit
    return [*visits, *game.walkthrough]


def slipping(game: Game, rng: np.random.Generator, limit: int) -> tuple[list[str], list[int]]:
    """A searching plan with slips, and the places of these in it; at most `limit` commands where the plan itself has no more.

    A slip is a command of another moment that does nothing now, or a way to another place. After that the plan goes
    on, from the place where it was: the way back is part of it.
    """
    plan = searching(game, rng, SLIPPING_SEARCHES)
    state, _ = game.start()
    moments = [state]
    for command in plan:
        moments.append(game.step(moments[-1], command)[0])
    known = sorted({command for moment in moments for command in moment.commands})
    said: list[str] = []
    slips: list[int] = []
    place = ""
    for i, command in enumerate(plan):
        moves = command.startswith("go to ")
        spare = limit - len(said) - (len(plan) - i)
        if spare >= 2 and rng.random() < SLIP:
            wanders = bool(place or moves) and rng.random() < WANDER
            ways = [c for c in state.commands if c.startswith("go to ") and c != command]
            wrong = [c for c in known if c not in state.commands]
            some = ways if wanders else wrong
            if some:
                slips.append(len(said))
                said.append(str(rng.choice(some)))
                if wanders:
                    state, _ = game.step(state, said[-1])
                    if not moves:
                        said.append(place)
                        state, _ = game.step(state, place)
        said.append(command)
        state, _ = game.step(state, command)
        place = command if moves else place
    return said, slips


def demonstration(policy: LanguagePolicy, games: Sequence[Game], number: int, cfg: TextRlConfig) -> EpisodeRollout:
    """The walkthrough of a game as a transcript, by `cfg.demonstrations`; its policy mask is what `cfg.imitate` says, without
    slips. Raises UserError for a game without one."""
    game = games[number]
    require(len(game.walkthrough) > 0, f"{game.path} carries no walkthrough to imitate")
    plan, slips = list(game.walkthrough), list[int]()
    rng = np.random.default_rng([cfg.seed, int(game.digest[:8], 16)])
    if cfg.demonstrations == "searching":
        plan = searching(game, rng)
    elif cfg.demonstrations == "slipping":
        plan, slips = slipping(game, rng, cfg.train_max_steps)
    world = GameWorld(games, cfg.train_max_steps)
    [(rollout,)] = roll(
        Teacher(policy, plan), world, [Start(task_id=number, init_id=number)], 1, (cfg.seed, 0), cfg.episodes,
        cfg.model.max_new_tokens, cfg.model.max_prompt_tokens,
    )  # fmt: skip
    commands = rollout.policy_mask
    everything = np.arange(len(commands)) > 0  # the first token follows nothing
    wanted = commands if cfg.imitate == "commands" else everything
    return replace(rollout, policy_mask=wanted & ~(commands & np.isin(rollout.turn_id, slips)))


class Imitation:
    """Takes the place of the core's loop: `grpo.n_groups` walkthroughs an update, one supervised step on their commands."""

    def __init__(self, cfg: TextRlConfig, learner: Learner, games: Sequence[Game]):
        self.cfg, self.learner, self.games, self.ledger = cfg, learner, games, Ledger()
        self._known: dict[int, EpisodeRollout] = {}  # every pass says the same

    def label(self, number: int) -> EpisodeRollout:
        """The transcript of a game's walkthrough."""
        if number not in self._known:
            self._known[number] = demonstration(self.learner.policy, self.games, number, self.cfg)
        return self._known[number]

    def step(self, step: int) -> dict[str, float]:
        """One update; returns its metrics."""
        n = self.cfg.grpo.n_groups
        drawn = batch_of(range(len(self.games)), step, n, self.cfg.seed)
        with self.ledger.phase("demonstrations"):
            labels = [self.label(number) for number in drawn]
        fresh = max(0, min(n, len(self.games) - step * n))  # of the first pass: later ones play nothing
        self.ledger.add_real("demonstrations", sum(r.steps for r in labels[:fresh]))
        with self.ledger.phase("update"):
            metrics = imitate(self.learner, labels)
        won = float(np.mean([r.success for r in labels]))
        return {f"loss/{k}": v for k, v in metrics.items()} | {"demonstrations/success": won} | self.ledger.metrics()

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.ledger.load_state_dict(state["ledger"])
