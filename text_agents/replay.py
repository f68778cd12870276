"""`vla-wmrl text replay`: do tau2-bench's own solutions score 1 through our adapter, and nothing 0?"""

from __future__ import annotations

import json
import time
from pathlib import Path

from text_agents import tau2_data
from text_agents.config import ReplayConfig
from text_agents.tau2 import PROTOCOL, REPLAY_STEPS, Tau2Task, replay_ground_truth
from vla_wmrl.tracking import JsonLines, write_json


def main(cfg: ReplayConfig) -> None:
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    out, summary = JsonLines(folder / "episodes.jsonl"), {}
    for domain in cfg.domains:
        rows = []
        for task_id in tau2_data.task_ids(domain, cfg.split)[:: cfg.every]:
            start = time.process_time()
            result = replay_ground_truth(Tau2Task(domain, task_id), cfg.solo)
            middle = time.process_time()
            rows.append({
                "domain": domain, "task_id": task_id, "reward": result.reward,
                "stop_reason": result.info["stop_reason"],
                "do_nothing": tau2_data.do_nothing_reward(domain, task_id), "replay_s": middle - start,
                "do_nothing_s": time.process_time() - middle,
            })  # fmt: skip
            out.write(rows[-1] | {"versions": tau2_data.versions()})
        summary[domain] = {
            "tasks": len(rows), "reward_1": sum(r["reward"] == 1.0 for r in rows),
            "do_nothing_1": sum(r["do_nothing"] == 1.0 for r in rows),
            "replay_s": sum(r["replay_s"] for r in rows) / len(rows),
        }  # fmt: skip
        print(f"{domain}: {summary[domain]}", flush=True)
    out.close()
    found = {
        "protocol": PROTOCOL.format(max_steps=REPLAY_STEPS),
        "versions": tau2_data.versions(),
        "split": cfg.split,
        "every": cfg.every,
        "solo": cfg.solo,
    }
    write_json(folder / "summary.json", found | {"domains": summary})
    print(json.dumps(found | {"domains": summary}, indent=1))
