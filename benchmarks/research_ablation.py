"""All arms of AutoResearch with the CPU-default agent: runs the (seed, arm) cells that are missing, then writes the table.

    OMP_NUM_THREADS=1 python benchmarks/research_ablation.py --config_path=configs/autoresearch.yaml --seeds=0,1,2 \\
        --runs=outputs/research_ablation --output_dir=results/autoresearch [--steps=20 ...]

Every cell is an ordinary `vla-wmrl research train` run and resumes from its own checkpoints, so that the grid fills
piece by piece, and cells of an earlier table whose run folders are gone stay in it; cells share one memory of sandbox
outcomes, which changes the wall time and nothing else. The policy before training is the same for all arms of a seed: it is
evaluated once a seed, as the arm "before".

Writes summary.json, a row an (arm, seed, task): `percentile` is the mean over `n` trajectories of the best turn's
HumanRank on the task, in percent; `sandbox_s` and `wall_s` are those of *training* the cell, the same on all its rows
(computing seconds of the programs asked for; seconds on the clock of everything but evaluation). And table.md, and
curves.png: held-out percentile against sandbox seconds, and what the world model and the sandbox said while training."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import add, curve, run_cell
from vla_wmrl.stats import Difference, paired_difference
from vla_wmrl.tracking import read_jsonl

ARMS = ("real", "wm", "mix", "debias", "denoise", "wmrl")
DIFFERENCES = (*((arm, "before") for arm in ARMS), ("wmrl", "mix"), ("wmrl", "wm"), ("debias", "mix"), ("denoise", "mix"))


def rows_of(arm: str, seed: int, trajectories: list[dict], sandbox_s: float, wall_s: float) -> list[dict]:
    """A row a task; an ungraded trajectory is missing from the mean."""
    rows = []
    for task in dict.fromkeys(r["task"] for r in trajectories):
        own = [r for r in trajectories if r["task"] == task]
        graded = [r["percentile"] for r in own if r["percentile"] is not None]
        rows.append({
            "arm": arm, "seed": seed, "task": task, "held_out": own[0]["held_out"],
            "percentile": float(np.mean(graded)) if graded else None, "n": len(graded),
            "sandbox_s": round(sandbox_s, 1), "wall_s": round(wall_s, 1),
        })  # fmt: skip
    return rows


def cell_rows(folder: Path) -> list[dict]:
    """Rows of a finished cell."""
    arm, _, seed = folder.name.rpartition("_")
    ledger = json.loads((folder / "ledger.json").read_text(encoding="utf-8"))
    phases = {k: v for k, v in ledger.items() if k.startswith("time/") and k not in ("time/total_s", "time/evaluation_s")}
    spent = ledger.get("worker_time/sandbox_anchors_s", 0.0)
    return rows_of(arm, int(seed), read_jsonl(folder / "eval_after.jsonl"), spent, sum(phases.values()))


def metric_rows(folder: Path) -> list[dict]:
    """What the plot reads of a cell's updates."""
    arm, _, seed = folder.name.rpartition("_")
    keys = ("step", "reward/wm_mean", "reward/env_mean")
    return [{"arm": arm, "seed": int(seed), **{k: r.get(k) for k in keys}} for r in read_jsonl(folder / "metrics.jsonl")]


def table(rows: list[dict]) -> str:
    """Mean percentile of held-out tasks by arm, its paired difference from real execution on the same seeds, and others."""
    lines = [
        "| arm | seeds | held-out percentile | less real | 95 % interval (tasks) | sandbox s | share of real's | wall s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    held = [r for r in rows if r["held_out"] and r["percentile"] is not None]
    for arm in ("before", *ARMS):
        own = [r for r in held if r["arm"] == arm]
        if not own:
            continue
        mean = np.mean([r["percentile"] for r in own])
        cells = {r["seed"]: r for r in own}
        sandbox, wall = (np.mean([r[k] for r in cells.values()]) for k in ("sandbox_s", "wall_s"))
        difference, interval, share = "", "", ""
        found = None if arm == "real" else less(rows, arm, "real")
        if found is not None:
            difference, interval = f"{found.value:+.1f}", f"[{found.low:+.1f}, {found.high:+.1f}]"
            spent = {r["seed"]: r["sandbox_s"] for r in held if r["arm"] == "real" and r["seed"] in cells}
            share = f"{sum(cells[s]['sandbox_s'] for s in spent) / sum(spent.values()):.0%}"
        lines.append(
            f"| {arm} | {len(cells)} | {mean:.1f} | {difference} | {interval} | {sandbox:.0f} | {share} | {wall:.0f} |"
        )
    lines += ["", "| held-out percentile | difference | 95 % interval (tasks) | seeds |", "|---|---|---|---|"]
    for arm, other in DIFFERENCES:
        if (found := less(rows, arm, other)) is not None:
            seeds = {r["seed"] for r in held if r["arm"] == arm} & {r["seed"] for r in held if r["arm"] == other}
            lines.append(f"| {arm} less {other} | {found.value:+.1f} | [{found.low:+.1f}, {found.high:+.1f}] | {len(seeds)} |")
    return "\n".join(lines) + "\n"


def less(rows: list[dict], arm: str, other: str) -> Difference | None:
    """How far `arm` is above `other` on held-out tasks, paired by seed and task, with an interval over tasks; None unpaired."""
    by_arm = [
        {
            (r["seed"], r["task"]): r["percentile"]
            for r in rows
            if r["arm"] == a and r["held_out"] and r["percentile"] is not None
        }
        for a in (other, arm)
    ]
    keys = [key for key in by_arm[1] if key in by_arm[0]]
    if not keys:
        return None
    return paired_difference(*(np.array([own[key] for key in keys]) for own in by_arm), np.array([task for _, task in keys]))


def plot(metrics: list[dict], rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for i, arm in enumerate(("before", *ARMS)):
        held = [r for r in rows if r["arm"] == arm and r["held_out"] and r["percentile"] is not None]
        seeds = sorted({r["seed"] for r in held})
        points = [[(r["sandbox_s"], r["percentile"]) for r in held if r["seed"] == s] for s in seeds]
        if points:
            axes[0].plot(*np.array([np.mean(p, axis=0) for p in points]).T, "o", color=f"C{i}", label=arm)
        for ax, name in ((axes[1], "reward/wm_mean"), (axes[2], "reward/env_mean")):
            values = curve(metrics, arm, name)
            if len(values) and np.isfinite(values).any():
                ax.plot(np.arange(1, len(values) + 1), values, color=f"C{i}", label=arm)
    axes[0].set(title="held-out percentile, a point a seed", xlabel="sandbox seconds of training")
    axes[1].set(title="reward in the world model", xlabel="update")
    axes[2].set(title="reward in the sandbox (anchors; real: all)", xlabel="update")
    for ax in axes:
        if ax.lines:
            ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def write(runs: Path, out: Path) -> None:
    """The results so far."""
    rows: list[dict] = []
    metrics: list[dict] = []
    for path in sorted(runs.glob("before_*.jsonl")):
        rows += rows_of("before", int(path.stem.rpartition("_")[2]), read_jsonl(path), 0.0, 0.0)
    for folder in sorted(p for p in runs.iterdir() if (p / "ledger.json").exists()):
        rows += cell_rows(folder)
        metrics += metric_rows(folder)
    out.mkdir(parents=True, exist_ok=True)
    rows, metrics = add(out / "summary.json", rows), add(out / "metrics.jsonl.gz", metrics)
    (out / "table.md").write_text(table(rows), encoding="utf-8")
    plot(metrics, rows, out / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config_path", default="configs/autoresearch.yaml")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="outputs/research_ablation")
    parser.add_argument("--output_dir", default="results/autoresearch")
    args, extra = parser.parse_known_args()
    runs = Path(args.runs)
    runs.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(",")):
        for arm in args.arms.split(","):
            command = ["research", "train", f"--config_path={args.config_path}", f"--arm={arm}", f"--seed={seed}"]
            memory = f"--memory={runs / 'outcomes.jsonl'}"
            run_cell([*command, memory, *extra], runs / f"{arm}_{seed}", runs / f"before_{seed}.jsonl")
            write(runs, Path(args.output_dir))


if __name__ == "__main__":
    main()
