"""Rows of results/text_rl from run folders of `vla-wmrl text rl`. Run:

    python benchmarks/text_rl_summary.py --runs SFT=RUN/eval_before@0 "policy RL=RUN/eval_after@0" --output_dir=results/text_rl

NAME=EVALUATION@SEED names an evaluation (without .jsonl) of a run of that seed. A row a split and metric: success with
Wilson's interval, and the share of commands that are invalid, or invalid or inefficient. `train_env_steps` are those of the
run (its ledger: 0 for an evaluation before training, demonstrations for imitation), not of what it started from. Rows of
other names and seeds that the output has are kept. Differences of success to the first evaluation of the same seed are paired
by game (exact McNemar). Also writes episodes.jsonl.gz, metrics.jsonl.gz and success.png: success of training episodes by
commands executed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import add
from vla_wmrl import stats
from vla_wmrl.tracking import read_jsonl

RUN = ("anchors", "demonstrations")  # purposes of commands executed to train


def rows_of(name: str, seed: int, rows: list[dict], first: list[dict], steps: int) -> list[dict]:
    """Summary rows of one evaluation beside the first of its seed."""
    table = []
    for split in dict.fromkeys(r["split"] for r in rows):
        own = [r for r in rows if r["split"] == split]
        before = {r["game"]: r["success"] for r in first if r["split"] == split}
        n, won = len(own), sum(r["success"] for r in own)
        low, high = stats.wilson(won, n)
        row = {"env": "alfworld", "arm": name, "method": name, "seed": seed, "split": split, "train_env_steps": steps}
        paired = [(before[r["game"]], r["success"]) for r in own if r["game"] in before]
        p = stats.mcnemar(*np.array(paired, bool).T) if paired else None
        table.append(row | {"metric": "success", "value": won / n, "low": low, "high": high, "n": n, "p_vs_first": p})
        actions = sum(r["steps"] for r in own)
        for metric, keys in (("invalid", ("invalid",)), ("invalid_or_inefficient", ("invalid", "inefficient"))):
            table.append(row | {"metric": metric, "value": sum(r[k] for r in own for k in keys) / actions, "n": actions})
    return table


def steps_of(evaluation: Path) -> int:
    """Commands that the run of an evaluation executed to train before it."""
    if evaluation.name.endswith("before"):
        return 0
    ledger = json.loads((evaluation.parent / "ledger.json").read_text(encoding="utf-8"))
    return int(sum(ledger.get(f"steps/real_{purpose}", 0) for purpose in RUN))


def plot(metrics: list[dict], path: Path) -> None:
    """Success of training episodes against commands executed, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.subplots()
    names = list(dict.fromkeys(r["arm"] for r in metrics))
    for arm, seed in dict.fromkeys((r["arm"], r["seed"]) for r in metrics):
        points = [(r["steps/real"], r["success/env"]) for r in metrics if (r["arm"], r["seed"]) == (arm, seed)]
        color = f"C{names.index(arm)}"
        x, y = np.array([p for p in points if p[1] is not None], float).reshape(-1, 2).T
        if len(x):
            smooth = np.convolve(np.pad(y, 2, mode="edge"), np.full(5, 0.2), mode="valid")
            ax.plot(x, 100 * y, color=color, alpha=0.25)
            ax.plot(x, 100 * smooth, color=color, label=f"{arm}, seed {seed}")
    ax.set(xlabel="commands executed in training", ylabel="success of training episodes, %", ylim=(0, 100))
    if ax.lines:
        ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    table, episodes, metrics, first = [], [], [], {}
    for item in args.runs:
        name, _, rest = item.partition("=")
        path, _, seed = rest.rpartition("@")
        if not (path and seed.isdigit()):
            raise SystemExit(f"{item}: name an evaluation as NAME=RUN/eval_after@SEED")
        rows, key = read_jsonl(f"{path}.jsonl"), {"arm": name, "seed": int(seed)}
        if not rows:
            raise SystemExit(f"{path}.jsonl holds no episodes")
        table += rows_of(name, int(seed), rows, first.setdefault(seed, rows), steps_of(Path(path)))
        episodes += [key | row for row in rows]
        if not path.endswith("before"):
            kept = ("step", "steps/real", "success/env", "success/wm", "episode/invalid", "rft/accepted", "loss/nll")
            run = read_jsonl(Path(path).parent / "metrics.jsonl")
            metrics += [key | {k: row.get(k) for k in kept} for row in run]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    table = add(args.output_dir / "summary.json", table)
    add(args.output_dir / "episodes.jsonl.gz", episodes)
    plot(add(args.output_dir / "metrics.jsonl.gz", metrics), args.output_dir / "success.png")
    for r in table:
        if r["metric"] == "success":
            told = f"{r['value']:.3f} [{r['low']:.3f}, {r['high']:.3f}] of {r['n']}"
            print(
                f"{r['method']:20s} seed {r['seed']} {r['split']:14s} {told}, {r['train_env_steps']} steps, p {r['p_vs_first']}"
            )


if __name__ == "__main__":
    main()
