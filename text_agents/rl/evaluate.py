"""Episodes of a language policy on held-out tasks: one JSON line an episode, success with its interval a split or domain."""

from __future__ import annotations

from pathlib import Path

from text_agents.language_policy import LanguagePolicy
from text_agents.rl.bench import Bench
from text_agents.rl.config import TextRlConfig
from text_agents.rl.episodes import roll
from vla_wmrl.progress import Progress
from vla_wmrl.tracking import JsonLines, read_jsonl
from vla_wmrl.types import Start

_EVALUATION = 0xE7A1  # stream of the random numbers


def evaluate(policy: LanguagePolicy, bench: Bench, cfg: TextRlConfig, path: Path, label: str) -> tuple[dict, int]:
    """Plays every held-out task once; (a summary a split or domain, environment steps).

    Rows go to `path`, and it goes on where it stopped; episodes without a reward are played again then.
    """
    out = JsonLines(path, keep=lambda row: row.get("reward", 0.0) is not None)
    done = {bench.place_of(row) for row in read_jsonl(path)}
    with Progress(sum(map(len, bench.held.values())), f"evaluate {label}", done=len(done)) as progress:
        for name, some in bench.held.items():
            world = bench.held_world(name)
            left = [i for i, item in enumerate(some) if bench.place(name, item) not in done]
            for first in range(0, len(left), cfg.episodes.batch):
                part = [Start(task_id=i, init_id=i) for i in left[first : first + cfg.episodes.batch]]
                groups = roll(
                    policy, world, part, 1, (cfg.seed, _EVALUATION), cfg.episodes, cfg.model.max_new_tokens,
                    cfg.model.max_prompt_tokens, cfg.eval.greedy,
                )  # fmt: skip
                for start, (rollout,) in zip(part, groups, strict=True):
                    out.write(bench.row(name, some[start.task_id], rollout))
                progress.update(len(part), name)
    out.close()
    rows = read_jsonl(path)
    return bench.summarize(rows), sum(row["steps"] for row in rows)
