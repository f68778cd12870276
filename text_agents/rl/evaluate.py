"""Episodes of a language policy on held-out games: one JSON line an episode, success with its interval a split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from text_agents import alfworld
from text_agents.alfworld_games import Game
from text_agents.language_policy import LanguagePolicy
from text_agents.rl.config import TextRlConfig
from text_agents.rl.episodes import EpisodeRollout, GameWorld, roll
from vla_wmrl.progress import Progress
from vla_wmrl.stats import wilson
from vla_wmrl.tracking import JsonLines, read_jsonl
from vla_wmrl.types import Start

_EVALUATION = 0xE7A1  # stream of the random numbers


def evaluate(policy: LanguagePolicy, games: dict[str, Sequence[Game]], cfg: TextRlConfig, path: Path, label: str) -> dict:
    """Plays every game of every split once; a summary a split. Rows go to `path`, and it goes on where it stopped."""
    done = {(row["split"], row["game"]) for row in read_jsonl(path)}
    out = JsonLines(path)
    with Progress(sum(map(len, games.values())), f"evaluate {label}", done=len(done)) as progress:
        for split, some in games.items():
            world = GameWorld(some, cfg.eval.max_steps)
            left = [i for i, game in enumerate(some) if (split, game.name) not in done]
            for first in range(0, len(left), cfg.episodes.batch):
                part = [Start(task_id=i, init_id=i) for i in left[first : first + cfg.episodes.batch]]
                groups = roll(
                    policy, world, part, 1, (cfg.seed, _EVALUATION), cfg.episodes, cfg.model.max_new_tokens,
                    cfg.model.max_prompt_tokens, cfg.eval.greedy,
                )  # fmt: skip
                for start, (rollout,) in zip(part, groups, strict=True):
                    out.write(_row(some[start.task_id], rollout, split, cfg.seed))
                progress.update(len(part), split)
    out.close()
    rows = read_jsonl(path)
    return {split: _summary([r for r in rows if r["split"] == split], some, cfg) for split, some in games.items()}


def _row(game: Game, r: EpisodeRollout, split: str, seed: int) -> dict:
    episode = alfworld.Episode(
        game.name, game.task_type, game.digest, split, seed, r.success, r.steps, not r.success, r.kinds.count("invalid"),
        r.kinds.count("inefficient"), list(r.commands), list(r.observations),
    )  # fmt: skip
    more = {"stop": r.stop_reason, "malformed": r.malformed, "cut": r.cut, "tokens": len(r.token_ids)}
    return alfworld.row(episode) | more


def _summary(rows: Sequence[dict], games: Sequence[Game], cfg: TextRlConfig) -> dict:
    names = {f.name for f in fields(alfworld.Episode)}
    episodes = [alfworld.Episode(**{k: v for k, v in row.items() if k in names}) for row in rows]
    found = alfworld.summarize(episodes, games, cfg.eval.max_steps)
    low, high = wilson(found["all"]["successes"], len(rows))
    actions = found["all"]["actions"]
    found["all"] |= {
        "success_low": low, "success_high": high, "malformed": sum(r["malformed"] for r in rows) / actions,
        "cut_replies": sum(r["cut"] for r in rows) / actions, "token_limit": sum(r["stop"] == "token_limit" for r in rows),
    }  # fmt: skip
    return found | {"greedy": cfg.eval.greedy, "list_commands": cfg.episodes.list_commands}
