"""`vla-wmrl text replay`: do tau2-bench's own solutions score 1 through our adapter, and nothing 0?"""

from __future__ import annotations

import json
import time
from pathlib import Path

from text_agents import tau2_data
from text_agents.config import ReplayConfig
from text_agents.tau2 import PROTOCOL, REPLAY_STEPS, Tau2Task, replay_ground_truth
from vla_wmrl.tracking import JsonLines, read_jsonl, write_json


def main(cfg: ReplayConfig) -> None:
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "episodes.jsonl"
    rows = read_jsonl(path)
    held = {(row["domain"], row["task_id"]) for row in rows}
    tasks = [Tau2Task(d, i) for d in cfg.domains for i in tau2_data.task_ids(d, cfg.split)[:: cfg.every]]
    out = JsonLines(path)
    for task in [t for t in tasks if (t.domain, t.task_id) not in held][: cfg.limit]:
        rows.append(replay(task, cfg.solo))
        out.write(rows[-1])
    out.close()
    found = {
        "protocol": PROTOCOL.format(max_steps=REPLAY_STEPS), "versions": tau2_data.versions(), "split": cfg.split,
        "every": cfg.every, "solo": cfg.solo, "planned": len(tasks), "complete": len(rows) == len(tasks),
        "domains": {domain: rates([r for r in rows if r["domain"] == domain]) for domain in cfg.domains},
    }  # fmt: skip
    write_json(folder / "summary.json", found)
    print(json.dumps(found, indent=1))


def replay(task: Tau2Task, solo: bool) -> dict:
    """One row: rewards of the task's own actions and of doing nothing, with their CPU seconds."""
    start = time.process_time()
    result = replay_ground_truth(task, solo)
    middle = time.process_time()
    nothing = tau2_data.do_nothing_reward(task.domain, task.task_id)
    return {
        "domain": task.domain, "task_id": task.task_id, "reward": result.reward,
        "stop_reason": result.info["stop_reason"], "do_nothing": nothing, "replay_s": middle - start,
        "do_nothing_s": time.process_time() - middle, "versions": tau2_data.versions(),
    }  # fmt: skip


def rates(rows: list[dict]) -> dict:
    return {
        "tasks": len(rows), "reward_1": sum(r["reward"] == 1.0 for r in rows),
        "do_nothing_1": sum(r["do_nothing"] == 1.0 for r in rows),
        "replay_s": sum(r["replay_s"] for r in rows) / max(len(rows), 1),
    }  # fmt: skip
