"""`vla-wmrl eval`: success of a lerobot checkpoint on explicit initial states; one JSON line an episode.

Everything else is computed from those lines, and no rate is printed before every planned episode is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sim.compose import env_spec, make_pool, policy_ref
from sim.libero import EnvSpec
from sim.protocol import CONTROL_HZ, describe
from sim.rollout import PolicyRef, RolloutJob
from sim.suites import suite_tasks
from sim.user_env import UserSpec
from sim.workers import Pool
from vla_wmrl.config_commands import EvalConfig
from vla_wmrl.errors import UserError
from vla_wmrl.progress import Progress
from vla_wmrl.stats import wilson
from vla_wmrl.tracking import JsonLines, read_jsonl, start_run, write_json
from vla_wmrl.types import Start

JOB_EPISODES = 10  # episodes of one task in one job
VIDEO_SIZE = 256


@dataclass(frozen=True)
class EvalPlan:
    """Which episodes, of which policy. The same plan gives the same episodes with any number of workers."""

    specs: tuple[EnvSpec | UserSpec, ...]
    init_ids: tuple[int, ...]
    policy: PolicyRef
    seed: int
    split: str = "official"
    stochastic: bool = False
    max_steps: int | None = None
    videos: int = 0  # of the first episodes of every task

    def episodes(self) -> list[tuple[EnvSpec | UserSpec, int]]:
        return [(spec, init) for spec in self.specs for init in self.init_ids]

    def jobs(self, done: set[tuple[int, int]]) -> list[RolloutJob]:
        """Jobs over episodes that are not in `done` (pairs of task and initial state), tasks interleaved."""
        jobs = []
        filmed = self.init_ids[: self.videos]
        for inits in (filmed, self.init_ids[self.videos :]):
            for first in range(0, len(inits), JOB_EPISODES):
                for spec in self.specs:
                    chosen = [i for i in inits[first : first + JOB_EPISODES] if (spec.task_id, i) not in done]
                    if chosen:
                        starts = tuple(Start(spec.task_id, i, split=self.split) for i in chosen)
                        jobs.append(
                            RolloutJob(spec, starts, (0,) * len(starts), self.policy, (self.seed,), self.stochastic,
                                       max_steps=self.max_steps, video_size=VIDEO_SIZE if inits is filmed else 0)
                        )  # fmt: skip
        return jobs


def evaluate(plan: EvalPlan, pool: Pool, folder: Path, name: str, label: str) -> list[dict]:
    """Runs what is missing of `plan`; `folder/name.jsonl` gets one row an episode. Returns all rows, in plan order."""
    path = folder / f"{name}.jsonl"
    rows = read_jsonl(path)
    log = JsonLines(path)
    jobs = plan.jobs({(r["task_id"], r["init_id"]) for r in rows})
    with Progress(len(plan.episodes()), label, done=len(rows)) as bar:
        for index, recorded in pool.run(jobs):
            for item in recorded:
                rollout, spec = item.rollout, jobs[index].spec
                row = spec.row() | {
                    "init_id": rollout.start.init_id, "split": plan.split, "seed": plan.seed, "success": rollout.success,
                    "steps": rollout.steps, "truncated": rollout.truncated, "progress": float(rollout.progress.max()),
                }  # fmt: skip
                if item.frames is not None:
                    row["video"] = save_video(folder, f"{name}_task{spec.task_id}_init{rollout.start.init_id}", item.frames)
                log.write(row)
                rows.append(row)
                bar.update(1)
    log.close()
    order = {(spec.task_id, init): i for i, (spec, init) in enumerate(plan.episodes())}
    return sorted((r for r in rows if (r["task_id"], r["init_id"]) in order), key=lambda r: order[r["task_id"], r["init_id"]])


def save_video(folder: Path, name: str, frames, fps: float = CONTROL_HZ) -> str:
    """Writes an mp4, by default at the control rate; returns its path inside `folder`."""
    import imageio

    (folder / "videos").mkdir(exist_ok=True)
    path = folder / "videos" / f"{name}.mp4"
    imageio.mimwrite(path, frames, fps=fps, macro_block_size=16)
    return str(path.relative_to(folder))


def summary(rows: Sequence[dict], planned: int) -> list[dict]:
    """Per task and over all: episodes, successes, rate, Wilson interval. Raises UserError while episodes are missing."""
    if len(rows) != planned:
        raise UserError(f"{len(rows)} of {planned} planned episodes exist: run again with --resume before quoting a rate")
    tasks = sorted({r["task_id"] for r in rows})
    table = []
    for task_id in [*tasks, None]:
        mine = [r for r in rows if task_id is None or r["task_id"] == task_id]
        wins = sum(r["success"] for r in mine)
        low, high = wilson(wins, len(mine))
        steps = sum(r["steps"] for r in mine) / len(mine)
        table.append({"task_id": task_id, "episodes": len(mine), "successes": wins, "rate": wins / len(mine),
                      "wilson_low": low, "wilson_high": high, "mean_steps": steps})  # fmt: skip
    return table


def show(table: Sequence[dict], suite: str, title: str) -> None:
    out = Table(title=title)
    for column in ("task", "instruction", "success", "rate", "95 % Wilson", "mean steps"):
        out.add_column(column, justify="left" if column == "instruction" else "right")
    names = suite_tasks(suite)
    for row in table:
        task_id = row["task_id"]
        out.add_row(
            "all" if task_id is None else str(task_id),
            "" if task_id is None else names[task_id].language,
            f"{row['successes']}/{row['episodes']}",
            f"{100 * row['rate']:.1f} %",
            f"{100 * row['wilson_low']:.1f} to {100 * row['wilson_high']:.1f}",
            f"{row['mean_steps']:.0f}",
        )
    Console().print(out)


def main(cfg: EvalConfig) -> int:
    """Evaluates `cfg.policy` on `cfg.ids()` of every task; writes episodes.jsonl and summary.json."""
    from sim.doctor import versions

    policy = policy_ref(cfg.policy, eta=None if cfg.noise == "sde" else 0.0)
    suite_tasks(cfg.env.suite)  # one that LIBERO does not have is refused before there is a folder
    folder = start_run(cfg.output_dir, cfg, {"command": "eval", "protocol": describe(cfg.env.suite), **versions()})
    plan = EvalPlan(
        specs=tuple(env_spec(cfg.env, task_id) for task_id in cfg.env.task_ids),
        init_ids=tuple(cfg.ids()),
        policy=policy,
        seed=cfg.seed,
        split=cfg.env.train_split,
        stochastic=cfg.noise == "sde",
        max_steps=cfg.env.max_steps,
        videos=cfg.videos,
    )
    with make_pool(cfg.workers) as pool:
        rows = evaluate(plan, pool, folder, "episodes", "evaluation")
    table = summary(rows, len(plan.episodes()))
    write_json(folder / "summary.json", table)
    print(json.dumps(describe(cfg.env.suite)))
    show(table, cfg.env.suite, f"{cfg.policy.path} on {cfg.env.suite}, {cfg.env.train_split} initial states")
    return 0
