"""All arms of the ablation on the shipped policy: runs the (arm, seed) cells that are missing, then writes the table.

    python benchmarks/ablation.py --config_path=configs/libero_long.yaml --arms=real,real_branch,wm,mix,debias,denoise,wmrl \\
        --seeds=0,1,2 --runs=outputs/ablation --output_dir=results/ablation [--variant=NAME] [--steps=20 ...]

Every cell is an ordinary `vla-wmrl train` run and resumes from its own checkpoints, so that the grid fills piece by
piece; cells of an earlier table whose run folders are gone stay in it. `--variant` names what further options change: its
cells are an arm of their own, "wmrl-NAME". What stands before evaluation is the same policy for all cells of a seed: it is
evaluated once a seed.
Writes summary.json (a row per arm, seed, task and phase), episodes.jsonl.gz, metrics.jsonl.gz, table.md (success and
cost of every arm, and differences between arms, paired over initial states on the seeds that both have, with a
bootstrap over states), arms.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import add, curve, run_cell
from vla_wmrl.stats import Difference, paired_difference, wilson
from vla_wmrl.tracking import read_jsonl

ARMS = ("real", "real_branch", "wm", "mix", "debias", "denoise", "wmrl")
PAIRS = (*(("wmrl", arm) for arm in ARMS if arm != "wmrl"), ("mix", "wm"), ("debias", "mix"), ("denoise", "mix"))
FACTORS = (("debias, wmrl", "mix, denoise"), ("denoise, wmrl", "mix, debias"))  # with and without: debiasing, weighting
COSTS = ("real_steps_train", "real_steps_once", "imagined_steps_train", "wall_s_train")
RUN, ONCE = ("anchors", "starts"), "world_model"  # purposes of real control steps: of this run, and of the world model's data


def arms_of(rows: list[dict]) -> list[str]:
    """The arms that are there in the order of `ARMS`, each before its variants ("wmrl-NAME")."""
    return sorted({r["arm"] for r in rows}, key=lambda arm: (ARMS.index(arm.partition("-")[0]), arm))


def pairs_of(arms: list[str]) -> list[tuple[str, str]]:
    """What is compared: every arm with the policy before, a variant with its arm, and `PAIRS`, a variant in its arm's place."""
    variants = [a for a in arms if "-" in a]
    pairs = [(arm, "before") for arm in arms] + list(PAIRS)
    for variant in variants:
        base = variant.partition("-")[0]
        pairs += [(variant, base), *(((variant, b) if a == base else (a, variant)) for a, b in PAIRS if base in (a, b))]
    return pairs


def rows_of(arm: str, seed: int, folder: Path, runs: Path) -> tuple[list[dict], list[dict]]:
    """Summary rows and episode rows of a finished cell."""
    ledger = json.loads((folder / "ledger.json").read_text())
    metrics = read_jsonl(folder / "metrics.jsonl")
    phases = {k[5:-2]: v for k, v in ledger.items() if k.startswith("time/") and k != "time/total_s"}
    training = sum(v for k, v in phases.items() if k != "evaluation")
    summary, episodes = [], []
    for phase, path in (("before", runs / f"before_{seed}.jsonl"), ("after", folder / "eval_after.jsonl")):
        mine = read_jsonl(path)
        episodes += [{"arm": arm, "phase": phase, **row} for row in mine]
        for task in sorted({r["task_id"] for r in mine}):
            of_task = [r for r in mine if r["task_id"] == task]
            summary.append({
                "arm": arm, "seed": seed, "task_id": task, "phase": phase, "episodes": len(of_task),
                "successes": sum(r["success"] for r in of_task), "policy_updates": metrics[-1]["step"],
                "real_steps_train": sum(ledger.get(f"steps/real_{p}", 0) for p in RUN),
                "real_steps_once": ledger.get(f"steps/real_{ONCE}", 0),
                "imagined_steps_train": ledger.get("steps/imagined", 0),
                "wall_s_train": round(training, 1), "wall_s_by_phase": {k: round(v, 1) for k, v in phases.items()},
            })  # fmt: skip
    return summary, episodes


def table(rows: list[dict]) -> str:
    """Success per arm, pooled over seeds and tasks, with Wilson intervals."""
    lines = [
        "| arm | seeds | before | after | gain | real steps a run | and once, for a world model | imagined steps | wall s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in arms_of(rows):
        mine = [r for r in rows if r["arm"] == arm]
        cells = {}
        for phase in ("before", "after"):
            of = [r for r in mine if r["phase"] == phase]
            wins, n = sum(r["successes"] for r in of), sum(r["episodes"] for r in of)
            low, high = wilson(wins, n)
            cells[phase] = (wins / n, f"{100 * wins / n:.1f} % [{100 * low:.1f}, {100 * high:.1f}] ({wins}/{n})")
        seeds = sorted({r["seed"] for r in mine})
        one = [next(r for r in mine if r["seed"] == s) for s in seeds]
        mean = {k: sum(r[k] for r in one) / len(one) for k in COSTS}
        costs = " | ".join(f"{mean[k]:.0f}" for k in COSTS)
        lines.append(f"| {arm} | {len(seeds)} | {cells['before'][1]} | {cells['after'][1]} | "
                     f"{100 * (cells['after'][0] - cells['before'][0]):+.1f} | {costs} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _points(episodes: list[dict], arm: str, task: int | None) -> dict[tuple[int, int, int], float]:
    """100 or 0 by (seed, task, initial state)."""
    own = [r for r in episodes if (r["phase"] == "before" if arm == "before" else (r["arm"], r["phase"]) == (arm, "after"))]
    return {(r["seed"], r["task_id"], r["init_id"]): 100.0 * r["success"] for r in own if task in (None, r["task_id"])}


def less(episodes: list[dict], arm: str, other: str, task: int | None = None) -> tuple[Difference, int] | None:
    """How far `arm` is above `other` ("before": the policy of then) in points of success, and on how many seeds both are there.

    Either may be several arms, "debias, wmrl": their mean, on seeds that all have. Paired over initial states, each the mean
    over these seeds: the interval says nothing about other seeds.
    """
    sides = [[_points(episodes, name, task) for name in names.split(", ")] for names in (other, arm)]
    keys = sorted(set.intersection(*(set(rows) for side in sides for rows in side)))
    if not keys:
        return None
    states = sorted({key[1:] for key in keys})
    pairs = [np.array([np.mean([rows[k] for rows in side for k in keys if k[1:] == s]) for s in states]) for side in sides]
    difference = paired_difference(*pairs, np.array([task_id for task_id, _ in states]), resample="episodes")
    return difference, len({key[0] for key in keys})


def differences(episodes: list[dict]) -> str:
    """Table of all pairs that are there, over all tasks and task by task."""
    tasks = sorted({r["task_id"] for r in episodes})
    lines = [
        "| points of success, paired over states | seeds | all [95 %] | " + " | ".join(f"task {t}" for t in tasks) + " |",
        "|" + "---|" * (3 + len(tasks)),
    ]
    for arm, other in (*pairs_of(arms_of(episodes)), *FACTORS):
        cells = [less(episodes, arm, other, task) for task in (None, *tasks)]
        if cells[0] is not None:
            said = [f"{d.value:+.1f} [{d.low:+.1f}, {d.high:+.1f}]" for d, _ in filter(None, cells)]
            lines.append(f"| {arm} less {other} | {cells[0][1]} | " + " | ".join(said) + " |")
    return "\n".join(lines) + "\n"


def plot(metrics: list[dict], rows: list[dict], path: Path) -> None:
    """Success after training by arm, for real, beside what the world model thinks of whole episodes while it trains."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    real, imagined = figure.subplots(1, 2)
    there = arms_of(rows)
    for arm, phase in [*((a, "before") for a in there[:1]), *((a, "after") for a in there)]:
        of = [r for r in rows if r["phase"] == phase and (phase == "before" or r["arm"] == arm)]
        if phase == "before":  # the same policy for all arms of a seed
            of = list({(r["seed"], r["task_id"]): r for r in of}.values())
        wins, n = sum(r["successes"] for r in of), sum(r["episodes"] for r in of)
        low, high = wilson(wins, n)
        label = f"{arm.replace('-', chr(10)) if phase == 'after' else phase}\n{len({r['seed'] for r in of})} seeds"
        error = 100 * np.array([[wins / n - low], [high - wins / n]])
        real.bar(label, 100 * wins / n, color="0.7" if phase == "before" else f"C{there.index(arm)}", yerr=error, capsize=3)
        values = curve(metrics, arm, "dream/success") if phase == "after" else np.empty(0)
        known = np.isfinite(values)
        if known.any():
            imagined.plot(np.flatnonzero(known) + 1, 100 * values[known], "o-", color=f"C{there.index(arm)}", label=arm)
    real.set(title="official states, for real (95 % Wilson)", ylabel="success, %", ylim=(0, 100))
    real.tick_params(axis="x", labelsize=8)
    imagined.set(title="whole episodes in the world model", xlabel="update", ylabel="success, %", ylim=(0, 100))
    if imagined.lines:
        imagined.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config_path", default="configs/libero_long.yaml")
    parser.add_argument("--variant", default="")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="outputs/ablation")
    parser.add_argument("--output_dir", default="results/ablation")
    args, extra = parser.parse_known_args()
    runs, out = Path(args.runs), Path(args.output_dir)
    runs.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(",")):
        for arm in args.arms.split(","):
            command = ["train", f"--config_path={args.config_path}", f"--arm={arm}", f"--seed={seed}", *extra]
            name = f"{arm}-{args.variant}" if args.variant else arm
            run_cell(command, runs / f"{name}_{seed}", runs / f"before_{seed}.jsonl")
            write(runs, out)


def write(runs: Path, out: Path) -> None:
    """The results so far."""
    summary, episodes, metrics = [], [], []
    for folder in sorted(runs.iterdir()):
        if (folder / "ledger.json").exists():
            arm, _, seed = folder.name.rpartition("_")
            more = rows_of(arm, int(seed), folder, runs)
            summary, episodes = summary + more[0], episodes + more[1]
            metrics += [{"arm": arm, "seed": int(seed), **row} for row in read_jsonl(folder / "metrics.jsonl")]
    summary, episodes = add(out / "summary.json", summary), add(out / "episodes.jsonl.gz", episodes)
    metrics = add(out / "metrics.jsonl.gz", metrics)
    (out / "table.md").write_text(f"{table(summary)}\n{differences(episodes)}")
    plot(metrics, summary, out / "arms.png")


if __name__ == "__main__":
    main()
