"""A language model in place of the games: it says what each command leads to, and a rule says whether the task is done.

The predictor is what `vla-wmrl text rwml` trains, or any model that answers `prompts.predict` with <next_state>. An imagined
episode begins with the real first observation of its game, which costs no step. Success: `alfworld_goal.reached` on the
predicted texts; its limits are listed there.

Non-obvious behaviour
* No commands are listed: a text says what is seen, not what can be done. Real groups beside it list none either (the arms
  fix that), or the policy would see two kinds of prompts.
* "Nothing happens." is an invalid command, as everywhere.
* An answer without a next state ends the episode without a reward: absent, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from text_agents.alfworld import AlfworldEnv, kind_of
from text_agents.alfworld_games import NOTHING_HAPPENS, Game
from text_agents.alfworld_goal import Goal, goal_of, reached
from text_agents.language_policy import LanguagePolicy
from text_agents.protocol import Observation, StepResult
from text_agents.rl.config import LanguageWorldSection
from text_agents.rl.forms import Household
from text_agents.rwml.evaluate import prompt_ids
from text_agents.rwml.rewards import predicted_state
from text_agents.rwml.triplets import Triplet
from vla_wmrl.errors import require
from vla_wmrl.policies.noise import lineage
from vla_wmrl.types import Source, Start

_WORLD = 0x3A11  # stream of the predictor's random numbers


class LanguageWorld:
    """Imagined episodes of `games`, side by side. A `rl.episodes.World`."""

    source: Source = "imagined"
    form = Household()

    def __init__(self, predictor: LanguagePolicy, games: Sequence[Game], max_steps: int, cfg: LanguageWorldSection):
        self.predictor, self.games, self.max_steps, self.cfg = predictor, games, max_steps, cfg
        self.asked = self.dropped_turns = 0  # predictions so far, and turns that did not fit their prompts
        self._opened: dict[int, tuple[Observation, Goal]] = {}  # game -> how it begins and its goal
        self._episodes: list[tuple[int, list[str], list[str]]] = []  # game, commands, texts

    def reset(self, starts: Sequence[Start]) -> list[Observation]:
        """Raises UserError for a game whose task is of no known form."""
        opened = [self._open(start.task_id) for start in starts]
        self._episodes = [(start.task_id, [], [now.text]) for start, now in zip(starts, opened, strict=True)]
        return opened

    def _open(self, number: int) -> Observation:
        if number not in self._opened:
            game = self.games[number]
            goal = goal_of(game.task)
            require(goal is not None, f"{game.path}: no rule says when {game.task!r} is done in an imagined episode")
            self._opened[number] = replace(AlfworldEnv().reset(game), admissible=()), goal
            game.release()
        return self._opened[number][0]

    def step(self, rows: Sequence[int], commands: Sequence[str], keys: Sequence[Sequence[int]]) -> list[StepResult]:
        asked = [prompt_ids(self.predictor, self._triplet(r, c), self.cfg) for r, c in zip(rows, commands, strict=True)]
        self.asked += len(asked)
        self.dropped_turns += sum(dropped for _, dropped in asked)
        answers = self._answers([tuple(ids) for ids, _ in asked], keys)
        return [self._result(*parts) for parts in zip(rows, commands, answers, strict=True)]

    def _answers(self, prompts: Sequence[tuple[int, ...]], keys: Sequence[Sequence[int]]) -> list[str]:
        """The predictor's answers. At temperature 0 equal prompts are asked once: members of a group begin alike."""
        model = self.cfg.model
        if model.temperature > 0:
            drawn = [lineage(_WORLD, *key) for key in keys]
            replies = self.predictor.sample(prompts, 1, model.max_new_tokens, keys=drawn)
        else:
            different = list(dict.fromkeys(prompts))
            found = self.predictor.sample(different, 1, model.max_new_tokens, greedy=True)
            of = dict(zip(different, found, strict=True))
            replies = [of[prompt] for prompt in prompts]
        return [self.predictor.chat.decode(reply.token_ids) for reply in replies]

    def _triplet(self, row: int, command: str) -> Triplet:
        """The question what `command` leads to."""
        number, commands, texts = self._episodes[row]
        game, turns = self.games[number], [list(turn) for turn in zip(commands, texts[:-1], strict=True)]
        task = self._opened[number][0].task
        return Triplet(
            "alfworld", game.name, task, 0, len(commands), json.dumps(turns), texts[-1], command.strip(), "", "alfworld", True
        )

    def _result(self, row: int, command: str, answer: str) -> StepResult:
        number, commands, texts = self._episodes[row]
        opening, goal = self._opened[number]
        text = predicted_state(answer)
        if text is None:
            return StepResult(Observation("", opening.task), None, False, True, {"kind": "missing", "won": False})
        command = command.strip()
        commands.append(command)
        texts.append(text)
        kind = "invalid" if text == NOTHING_HAPPENS or not command else kind_of(command, [command])
        won = reached(goal, texts)
        over = not won and len(commands) >= self.max_steps
        return StepResult(Observation(text, opening.task), float(won), won, over, {"kind": kind, "won": won})

    def close(self) -> None:
        self._episodes = []
