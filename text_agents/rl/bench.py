"""What a run of policy RL asks of the environment it trains in; and ALFWorld's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

from text_agents import alfworld
from text_agents.alfworld_games import find_games, games_hash
from text_agents.rl.config import TextRlConfig
from text_agents.rl.episodes import EpisodeRollout, GameWorld, World
from vla_wmrl.stats import wilson


class Bench(Protocol):
    """Tasks to train on, and held-out ones by split (or domain)."""

    train: Sequence[Any]
    held: dict[str, Sequence[Any]]

    def world(self) -> World:
        """Where training episodes run; `task_id` of a start is a place in `train`."""
        ...

    def held_world(self, name: str) -> World:
        """Where evaluation runs; `task_id` of a start is a place in `held[name]`."""
        ...

    def place(self, name: str, item: Any) -> tuple:
        """What tells a task from all others."""
        ...

    def place_of(self, row: dict) -> tuple:
        """The same, of a row of the results."""
        ...

    def row(self, name: str, item: Any, rollout: EpisodeRollout) -> dict:
        """An evaluated episode as a row, with `steps`."""
        ...

    def summarize(self, rows: Sequence[dict]) -> dict[str, dict]:
        """name -> what came out, with `success`, `success_low`, `success_high` and `episodes` under "all"."""
        ...

    def remark(self, rates: dict) -> str:
        """What to print beside a success rate."""
        ...

    def manifest(self) -> dict: ...


class AlfworldBench:
    """ALFWorld's games. Raises UserError where there are none."""

    def __init__(self, cfg: TextRlConfig):
        self.cfg, some = cfg, cfg.games
        self.train = find_games(some.split, some.data, some.task_types, some.limit)
        self.held = {split: find_games(split, some.data, some.task_types, cfg.eval.limit) for split in cfg.evaluated()}

    def world(self) -> GameWorld:
        return GameWorld(self.train, self.cfg.train_max_steps)

    def held_world(self, name: str) -> GameWorld:
        return GameWorld(self.held[name], self.cfg.eval.max_steps)

    def place(self, name: str, item) -> tuple:
        return name, item.name

    def place_of(self, row: dict) -> tuple:
        return row["split"], row["game"]

    def row(self, name: str, item, rollout: EpisodeRollout) -> dict:
        r = rollout
        episode = alfworld.Episode(
            item.name, item.task_type, item.digest, name, self.cfg.seed, r.success, r.steps, not r.success,
            r.kinds.count("invalid"), r.kinds.count("inefficient"), list(r.commands), list(r.observations),
        )  # fmt: skip
        more = {"stop": r.stop_reason, "malformed": r.malformed, "cut": r.cut, "tokens": len(r.token_ids)}
        return alfworld.row(episode) | more

    def summarize(self, rows: Sequence[dict]) -> dict[str, dict]:
        return {name: self._summary([r for r in rows if r["split"] == name], some) for name, some in self.held.items()}

    def _summary(self, rows: Sequence[dict], games: Sequence) -> dict:
        cfg, names = self.cfg, {f.name for f in fields(alfworld.Episode)}
        episodes = [alfworld.Episode(**{k: v for k, v in row.items() if k in names}) for row in rows]
        found = alfworld.summarize(episodes, games, cfg.eval.max_steps)
        low, high = wilson(found["all"]["successes"], len(rows))
        actions = found["all"]["actions"]
        found["all"] |= {
            "success_low": low, "success_high": high, "malformed": sum(r["malformed"] for r in rows) / actions,
            "cut_replies": sum(r["cut"] for r in rows) / actions, "token_limit": sum(r["stop"] == "token_limit" for r in rows),
        }  # fmt: skip
        return found | {"greedy": cfg.eval.greedy, "list_commands": cfg.episodes.list_commands}

    def remark(self, rates: dict) -> str:
        return f"{rates['invalid_or_inefficient']:.1%} of commands invalid or inefficient"

    def manifest(self) -> dict:
        return {
            "protocol": alfworld.PROTOCOL.format(max_steps=self.cfg.eval.max_steps), "train_games": len(self.train),
            "train_games_hash": games_hash(self.train), "versions": alfworld.versions(),
            "evaluated": {split: {"games": len(some), "hash": games_hash(some)} for split, some in self.held.items()},
        }  # fmt: skip
