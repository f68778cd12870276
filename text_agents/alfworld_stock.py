"""The same games in stock TextWorld with ALFWorld's own wrappers, to compare transcripts and speed with."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from text_agents.alfworld_games import Game


@dataclass(frozen=True)
class Line:
    """What a game says after one command, everything an agent sees."""

    command: str
    text: str
    admissible: tuple[str, ...]
    won: bool


def commands_for(game: Game, steps: int, seed: int):
    """A random walk: picks among the admissible commands, and now and then something that is not one."""
    rng = np.random.default_rng([seed, int(game.digest[:8], 16)])

    def choose(admissible: Sequence[str]) -> str:
        if rng.random() < 0.08:
            return ("", "go to the moon", "LOOK", " look ", "take apple 9 from desk 9")[rng.integers(5)]
        return admissible[rng.integers(len(admissible))]

    return choose, steps


def walk(game: Game, steps: int, seed: int = 0) -> list[Line]:
    """A random walk on our engine."""
    choose, steps = commands_for(game, steps, seed)
    state, text = game.start()
    lines = [Line("", text, tuple(state.admissible), game.won(state))]
    for _ in range(steps):
        command = choose(lines[-1].admissible)
        state, text = game.step(state, command)
        lines.append(Line(command, text, tuple(state.admissible), game.won(state)))
    return lines


class StockGame:
    """One game in stock TextWorld. `start` loads and resets it, as an episode does."""

    def __init__(self):
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

        infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
        self._wrappers, self._infos, self._textworld = (AlfredDemangler, AlfredInfos), infos, textworld

    def start(self, game: Game):
        demangler, infos = self._wrappers
        before = sys.argv
        self.env = self._textworld.start(str(game.path), request_infos=self._infos, wrappers=[demangler(), infos])
        state, sys.argv = self.env.reset(), before  # the translator replaces it
        return state

    def walk(self, game: Game, steps: int, seed: int = 0, started=None) -> list[Line]:
        """The same random walk as `walk`, from the state that `start` returned, or from a start of its own."""
        choose, steps = commands_for(game, steps, seed)
        state = self.start(game) if started is None else started
        lines = [Line("", state.feedback, tuple(state.admissible_commands), state.won)]
        for _ in range(steps):
            command = choose(lines[-1].admissible)
            state, _, _ = self.env.step(command)
            lines.append(Line(command, state.feedback, tuple(state.admissible_commands), state.won))
        return lines


def transcript_hash(lines: Sequence[Line]) -> str:
    """16 hex digits that change with any word of a transcript."""
    rows = [[line.command, line.text, list(line.admissible), bool(line.won)] for line in lines]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
