"""`vla-wmrl text play`: ALFWorld episodes of a scripted agent or a language model, as JSON lines and a summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from text_agents import alfworld
from text_agents.alfworld_games import Game, find_games
from text_agents.config import ModelSection, PlayConfig
from text_agents.protocol import Observation
from text_agents.rwml import prompts
from vla_wmrl.errors import require
from vla_wmrl.tracking import JsonLines, write_json


class ModelAgent:
    """A language model that acts in ALFWorld, one prompt a step with the history that fits in it."""

    def __init__(self, cfg: ModelSection, list_commands: bool = True):
        from text_agents import language_model
        from text_agents.transcripts import ChatFormat, shipped

        self._cfg, self._list, self._sample = cfg, list_commands, language_model.sample
        self.model, tokenizer = language_model.load_model(cfg.path, cfg.device)
        self.chat = ChatFormat(tokenizer, shipped(cfg.template) if cfg.template else None)
        self.dropped_turns = self.malformed = self.cut = 0  # history turns left out, replies without tags, replies cut short
        self._seen: list[str] = []

    def __call__(self, observation: Observation, commands: list[str], rng: np.random.Generator) -> str:
        from text_agents.transcripts import fit_history

        if not commands:
            self._seen = []
        turns = list(zip(commands, self._seen, strict=True))
        listed = observation.admissible if self._list else None

        def render(some) -> list[int]:
            text = prompts.act(observation.task, some, observation.text, listed)
            return self.chat.render([{"role": "user", "content": text}])

        ids, dropped = fit_history(render, turns, self._cfg.max_prompt_tokens)
        reply = self._sample(
            self.model,
            [ids],
            self.chat.end_id,
            self._cfg.max_new_tokens,
            self._cfg.temperature,
            int(rng.integers(2**31)),
        )[0]
        command, well_formed = prompts.command_in(self.chat.decode(reply.token_ids))
        self.dropped_turns += dropped
        self.malformed += not well_formed
        self.cut += not reply.ended
        self._seen.append(observation.text)
        return command

    def counts(self) -> dict[str, int]:
        return {"dropped_turns": self.dropped_turns, "malformed_replies": self.malformed, "cut_replies": self.cut}


def make_agent(kind: str, cfg: ModelSection, list_commands: bool = True) -> tuple[Callable[[Game], alfworld.Agent], object]:
    """(game -> agent, the model's agent or None)."""
    if kind == "walkthrough":
        return alfworld.walkthrough_agent, None
    if kind == "returning":
        return alfworld.returning_agent, None
    if kind == "random":
        return lambda game: alfworld.random_agent, None
    agent = ModelAgent(cfg, list_commands)
    return lambda game: agent, agent


def main(cfg: PlayConfig) -> None:
    games = find_games(cfg.split, cfg.data, cfg.task_types, cfg.limit)
    agent_for, model = make_agent(cfg.agent, cfg.model, cfg.list_commands)
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    out, episodes = JsonLines(folder / "episodes.jsonl"), []
    for i, game in enumerate(games, start=1):
        episode = alfworld.play(game, agent_for(game), cfg.split, cfg.seed, cfg.max_steps)
        game.release()
        out.write(alfworld.row(episode))
        episodes.append(episode)
        if i % 20 == 0 or i == len(games):
            print(f"{i}/{len(games)} games, {sum(e.success for e in episodes)} won", flush=True)
    out.close()
    require(len(episodes) == len(games), "not every game was played")
    summary = alfworld.summarize(episodes, games, cfg.max_steps)
    summary |= {"agent": cfg.agent, "split": cfg.split, "seed": cfg.seed, "max_steps": cfg.max_steps}
    summary |= model.counts() | {"model": cfg.model.path} if model else {}
    write_json(folder / "summary.json", summary)
    print(json.dumps(summary, indent=1))
