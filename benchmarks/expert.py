"""The scripted experts on LIBERO's initial states: one JSON line an episode, resumable, then summary.json.

    python benchmarks/expert.py --output_dir results/expert --workers 2
    python benchmarks/expert.py --output_dir results/expert --split train --noise 0.3 --stepping fast --episodes 10

With `--noise s`, a normal variate of standard deviation s, keyed by (task, init), is added to the three position
actions of every step, as when demonstrations are recorded. `--split train` takes states sampled from the task's own
placement regions in place of the official ones. Either writes its own files. Fixture placement is drawn by
(task, init, 0), as in evaluation.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np

STREAM = 31  # of the noise key
JOB_EPISODES = 5
TASK_JOBS = 10  # jobs of a process, one task's: a simulator does not give all of its memory back
built: dict = {}  # this process's simulator; one, since a task needs 0.3 GB


def episodes(job: tuple[int, tuple[int, ...], str, float, str]) -> list[dict]:
    """Runs the episodes (task, inits, stepping, noise, split) of one job in this process; one row each."""
    from sim.expert import Expert
    from sim.libero import EnvSpec, LiberoEnv
    from sim.rollout import begin
    from vla_wmrl.types import Start

    task_id, inits, stepping, noise, split = job
    spec = EnvSpec(task_id=task_id, image_size=0, stepping=stepping)
    if spec not in built:
        built.clear()
        built[spec] = LiberoEnv(spec)
    env = built[spec]
    expert, rows = Expert(env.spec.suite, task_id), []
    for init_id in inits:
        begin(env, Start(task_id, init_id, split=split))
        rng = np.random.default_rng([task_id, init_id, STREAM])
        started, success = time.perf_counter(), False
        while env.steps < env.max_steps and not success:
            action = expert.act(env.privileged()).astype(np.float64)
            action[:3] = np.clip(action[:3] + rng.normal(0.0, noise, 3), -1.0, 1.0)
            success = env.step(action)
        rows.append({"task_id": task_id, "init_id": init_id, "success": success, "steps": env.steps, "noise": noise,
                     "stepping": stepping, "wall_s": round(time.perf_counter() - started, 2)})  # fmt: skip
    return rows


def summarise(rows: list[dict]) -> list[dict]:
    """A row per task; `mean_steps` over its successes."""
    summary = []
    for task_id in sorted({r["task_id"] for r in rows}):
        mine = [r for r in rows if r["task_id"] == task_id]
        steps = [r["steps"] for r in mine if r["success"]]
        summary.append({"task_id": task_id, "episodes": len(mine), "successes": len(steps),
                        "mean_steps": round(float(np.mean(steps)), 1) if steps else None})  # fmt: skip
    return summary


def table(summary: list[dict]) -> str:
    """Markdown, with 95 % Wilson intervals."""
    from sim.suites import suite_tasks
    from vla_wmrl.stats import wilson

    lines = ["| task | instruction | successes | rate, % (95 % Wilson) | mean steps |", "|---|---|---|---|---|"]
    for row in summary:
        n, k = row["episodes"], row["successes"]
        low, high = wilson(k, n)
        what = suite_tasks("libero_10")[row["task_id"]].language
        rate = f"{100 * k / n:.0f} ({100 * low:.0f}-{100 * high:.0f})"
        lines.append(f"| {row['task_id']} | {what} | {k}/{n} | {rate} | {row['mean_steps']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="0,1,2,3,4,5,6,7,8,9", help="task ids, comma separated")
    parser.add_argument("--episodes", type=int, default=50, help="of every task: its first initial states")
    parser.add_argument("--split", default="official", choices=("official", "train"))
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation added to positions")
    parser.add_argument("--stepping", default="exact", choices=("robosuite", "exact", "near", "fast"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output_dir", type=Path, default=Path("results/expert"))
    args = parser.parse_args()

    suffix = ("" if args.split == "official" else "_train") + (f"_noise_{args.noise:g}" if args.noise else "")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    log = args.output_dir / f"episodes{suffix}.jsonl"
    packed = log.with_suffix(".jsonl.gz")
    if packed.exists() and not log.exists():
        with gzip.open(packed, "rb") as source, log.open("wb") as target:
            shutil.copyfileobj(source, target)
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(r["task_id"], r["init_id"]) for r in rows}
    jobs = []
    for task_id in (int(t) for t in args.tasks.split(",")):
        todo = [i for i in range(args.episodes) if (task_id, i) not in done]
        chunks = [tuple(todo[i : i + JOB_EPISODES]) for i in range(0, len(todo), JOB_EPISODES)]
        jobs += [(task_id, chunk, args.stepping, args.noise, args.split) for chunk in chunks]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(args.workers, maxtasksperchild=TASK_JOBS) as pool, log.open("a") as out:
        for new in pool.imap_unordered(episodes, jobs):
            for row in new:
                out.write(json.dumps(row) + "\n")
            out.flush()
            rows += new
            print(f"task {new[0]['task_id']}: {sum(r['success'] for r in new)} of {len(new)}", flush=True)
    rows.sort(key=lambda r: (r["task_id"], r["init_id"]))
    with gzip.GzipFile(packed, "wb", mtime=0) as out:
        out.write("".join(json.dumps(r) + "\n" for r in rows).encode())
    log.unlink(missing_ok=True)
    summary = summarise(rows)
    (args.output_dir / f"summary{suffix}.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(table(summary))


if __name__ == "__main__":
    main()
