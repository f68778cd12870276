"""`vla-wmrl info`: what a folder holds (checkpoint, run, data set), or the tasks of a suite."""

from __future__ import annotations

import json
from pathlib import Path

from vla_wmrl.config_commands import InfoConfig
from vla_wmrl.errors import UserError, require


def describe_suite(suite: str) -> list[str]:
    from sim import protocol
    from sim.suites import suite_tasks

    lines = [f"{key}: {value}" for key, value in protocol.describe(suite).items()]
    return lines + [f"task {task.task_id}: {task.language}" for task in suite_tasks(suite)]


def describe_checkpoint(folder: Path) -> list[str]:
    cfg = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lines = [f"lerobot checkpoint of type {cfg.get('type', '?')}"]
    for kind in ("input_features", "output_features"):
        lines += [f"{kind}: {name} {tuple(f['shape'])}" for name, f in (cfg.get(kind) or {}).items()]
    keys = ("chunk_size", "n_action_steps", "num_steps", "max_action_dim")
    lines += [f"{key}: {cfg[key]}" for key in keys if key in cfg]
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return [*lines, f"size: {size / 2**20:.1f} MiB"]


def describe_run(folder: Path) -> list[str]:
    from vla_wmrl import checkpoint
    from vla_wmrl.report import Run, rate_of

    run = Run.read(folder)
    env = run.config.get("env", {})
    lines = [f"run: arm {run.config.get('arm', '?')} on {env.get('suite', '?')}, seed {run.config.get('seed', '?')}"]
    lines.append(f"policy updates: {max((row['step'] for row in run.metrics), default=0)}")
    lines.append(f"checkpoints: {', '.join(map(str, checkpoint.steps(folder))) or 'none'}")
    for name, rows in (("before", run.before), ("after", run.after)):
        lines.append(f"success {name}: {rate_of(rows, None, run.planned, max(len(run.tasks), 1))}")
    return lines


def describe_dataset(folder: Path) -> list[str]:
    info = json.loads((folder / "meta" / "info.json").read_text(encoding="utf-8"))
    keys = ("codebase_version", "robot_type", "total_episodes", "total_frames", "total_tasks", "fps")
    lines = ["LeRobotDataset", *(f"{key}: {info[key]}" for key in keys if key in info)]
    return lines + [f"feature: {name} {f['dtype']} {tuple(f['shape'])}" for name, f in info.get("features", {}).items()]


def describe(folder: Path) -> list[str]:
    """Lines that say what `folder` holds. Raises UserError where it is nothing that is known."""
    require(folder.is_dir(), f"no folder {folder}")
    if (folder / "meta" / "info.json").is_file():
        return describe_dataset(folder)
    if (folder / "config.json").is_file():
        return describe_checkpoint(folder)
    if (folder / "config.yaml").is_file() or (folder / "metrics.jsonl").is_file():
        return describe_run(folder)
    if (folder / "pretrained_model").is_dir():
        return describe_checkpoint(folder / "pretrained_model")
    raise UserError(f"{folder} is no checkpoint, run or data set (no config.json, config.yaml or meta/info.json)")


def main(cfg: InfoConfig) -> int:
    lines = describe(Path(cfg.path)) if cfg.path is not None else describe_suite(cfg.suite)
    print("\n".join(lines))
    return 0
