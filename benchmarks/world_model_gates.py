"""What a world model must show before it may grade anything (all on initial states it was not fitted on).

    (a) replays that cannot react: perturbed open-loop actions, several per snapshot; is the object lifted at the end?
        AUC within a snapshot >= 0.85, >= 0.10 above a control without objects, not below a fitted geometric baseline;
        false positives <= 0.2 once calibrated (isotonic, leaving the initial state out).
    (b) closed loop: imagined and real success per (policy, start), >= 8 real rollouts a cell, rank correlation >= 0.6.
    (c) the control that sees actions and no object is printed beside, always.

Every figure has its n and a bootstrap interval over initial states. Run:

    python benchmarks/world_model_gates.py replays --world_model=DIR --segments=DIR \\
        --output=results/world_model/replays.json
    python benchmarks/world_model_gates.py closed_loop --cells=FILE.npz \\
        --output=results/world_model/closed_loop.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.graders import Replays, actions_only, gather, geometry
from sim.near_misses import GRASP, Segment, load_segments
from vla_wmrl import stats
from vla_wmrl.world_model.latent import StateSpaceModel

HELD_OUT = 150  # training initial states from here on are not fitted on
LAST = 8  # control steps at the end of a segment over which the model's verdict is averaged
BOOTSTRAP = 1000


def load(folder: Path, kind: str) -> tuple[list[Segment], list[Segment]]:
    """Segments of one kind: of fitted and of held-out initial states."""
    every = [s for file in sorted(folder.glob("*.npz")) for s in load_segments(file) if s.kind == kind]
    return [s for s in every if s.trace.init_id < HELD_OUT], [s for s in every if s.trace.init_id >= HELD_OUT]


def grade(model: StateSpaceModel, replays: Replays) -> dict[str, np.ndarray]:
    """The world model's verdicts: P(held at the end), and how high the highest object is imagined to rise (m)."""
    held, rise, off = (
        np.zeros(len(replays.actions)),
        np.zeros(len(replays.actions)),
        np.zeros((len(replays.actions), 2)),
    )
    for task in np.unique(replays.task):
        rows = np.flatnonzero(replays.task == task)
        starts = np.stack([replays.states[i][0] for i in rows])
        path, grades, _ = model.predict(int(task), starts, replays.actions[rows], replays.previous[rows])
        held[rows] = torch.sigmoid(grades.held[:, -LAST:]).mean(1).amax(-1).numpy()
        z = path.bodies[..., 2].numpy()
        start = model.scenes.read(int(task), starts)[1][..., 2].numpy()
        rise[rows] = (z[:, -1] - start).max(-1)
        truth_robot, truth = model.scenes.read(int(task), np.stack([replays.states[i][1:] for i in rows]))
        off[rows, 0] = (path.robot[:, -1, :3] - truth_robot[:, -1, :3]).norm(dim=-1).numpy()
        off[rows, 1] = (path.bodies[:, -1, :, :3] - truth[:, -1, :, :3]).norm(dim=-1).amax(-1).numpy()
    return {"held": held, "rise": rise, "off": off}


def calibrated(score: np.ndarray, outcome: np.ndarray, init: np.ndarray) -> np.ndarray:
    """[n] isotonic calibration, fitted on the other initial states."""
    from sklearn.isotonic import IsotonicRegression

    out = np.empty(len(score))
    for i in np.unique(init):
        rest = init != i
        fitted = IsotonicRegression(out_of_bounds="clip", y_min=0, y_max=1).fit(score[rest], outcome[rest])
        out[~rest] = fitted.predict(score[~rest])
    return out


def interval(figure: Callable[[np.ndarray], float], init: np.ndarray, seed: int = 0) -> dict[str, float]:
    """A figure of row indices, with a 95 % percentile bootstrap over initial states."""
    rng, ids = np.random.default_rng(seed), np.unique(init)
    rows_of = {i: np.flatnonzero(init == i) for i in ids}
    draws = []
    for _ in range(BOOTSTRAP):
        draws.append(figure(np.concatenate([rows_of[i] for i in rng.choice(ids, len(ids))])))
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return {"value": float(figure(np.arange(len(init)))), "low": float(low), "high": float(high)}


def concordance(score: np.ndarray, y: np.ndarray, group: np.ndarray, init: np.ndarray) -> np.ndarray:
    """[n, 2]: a row's share of the concordant and of all (lifted, missed) pairs of its snapshot; sums give the AUC."""
    out = np.zeros((len(y), 2))
    for g in np.unique(group):
        rows = np.flatnonzero(group == g)
        wins = np.sign(score[rows][y[rows]][:, None] - score[rows][~y[rows]][None])
        out[rows] = np.array([(1 + wins).sum() / 2, wins.size]) / len(rows)
    return out


def fast_auc(score: np.ndarray, y: np.ndarray) -> float:
    ranks, positive = rankdata(score), y.sum()
    return float((ranks[y].sum() - positive * (positive + 1) / 2) / max(positive * (len(y) - positive), 1))


def replays(args: argparse.Namespace) -> dict:
    model = StateSpaceModel.from_pretrained(args.world_model)
    fitted, held_out = load(Path(args.segments), GRASP)
    tasks = sorted({s.trace.task_id for s in held_out})
    train, test = gather(fitted, model.tasks), gather(held_out, model.tasks)
    begun = time.process_time()
    verdict = grade(model, test)
    seconds = time.process_time() - begun
    scores = {
        "world model: P(held)": verdict["held"],
        "world model: rise": verdict["rise"],
        "actions only (control)": actions_only(train, test, args.seed),
        "geometry": geometry(train, test, model.tasks, args.seed),
    }
    print({name: round(stats.auc(score, test.lifted), 3) for name, score in scores.items()}, flush=True)
    y, init = test.lifted, 1000 * test.task + test.init
    pairs = {name: concordance(score, y, test.group, init) for name, score in scores.items()}

    def within(name: str, rows: np.ndarray) -> float:
        won, every = pairs[name][rows].sum(0)
        return float(won / every) if every else float("nan")

    rows = {}
    for name, score in scores.items():
        p = calibrated(score, y, init)
        rows[name] = {
            "auc": interval(lambda i, s=score: fast_auc(s[i], y[i]), init),
            "auc_within_snapshot": interval(lambda i, n=name: within(n, i), init),
            "false_positives": interval(lambda i, p=p: float((p[i] > 0.5)[~y[i]].mean()), init),
            "true_positives": interval(lambda i, p=p: float((p[i] > 0.5)[y[i]].mean()), init),
            "auc_within_snapshot_by_task": {int(t): within(name, np.flatnonzero(test.task == t)) for t in tasks},
        }
    ours = "world model: P(held)"
    gaps = {
        name: interval(lambda i, n=name: within(ours, i) - within(n, i), init)
        for name in ("actions only (control)", "geometry")
    }
    best = rows[ours]
    passed = {
        "n >= 300": len(y) >= 300,
        "within-snapshot AUC >= 0.85": best["auc_within_snapshot"]["value"] >= 0.85,
        ">= 0.10 above the control": gaps["actions only (control)"]["value"] >= 0.10,
        "not below geometry": gaps["geometry"]["value"] >= 0,
        "false positives <= 0.2": best["false_positives"]["value"] <= 0.2,
    }
    quantiles = lambda x: [round(float(q) * 100, 2) for q in np.quantile(x, [0.5, 0.9])]  # noqa: E731
    return {
        "gate": "a: replays that cannot react",
        "n": len(y), "snapshots": len(np.unique(test.group)), "inits": len(np.unique(init)), "tasks": tasks,
        "lifted": float(y.mean()),
        "by_task": {
            int(t): {"n": int((test.task == t).sum()), "lifted": float(y[test.task == t].mean())} for t in tasks
        },
        "n_fitted": len(train.lifted), "updates": model.updates_,
        "graders": rows, "world_model_minus": gaps, "passed": passed,
        "end_error_cm_median_p90": {
            "hand": quantiles(verdict["off"][:, 0]), "object": quantiles(verdict["off"][:, 1]),
            "object_when_missed": quantiles(verdict["off"][~y, 1]),
            "object_when_lifted": quantiles(verdict["off"][y, 1]),
        },
        "cpu_s_for_all_predictions": seconds,
    }  # fmt: skip


def closed_loop(args: argparse.Namespace) -> dict:
    """`cells`: npz with policy [c], task [c], init [c], real [c, m], imagined [c, m] (see benchmarks/world_model_cells.py)."""
    data = np.load(args.cells)
    real, imagined, policy, task = data["real"].mean(1), data["imagined"].mean(1), data["policy"], data["task"]
    init = 1000 * task + data["init"]
    passed, imagined_passed = data["real_passed"].mean(1), data["imagined_passed"].mean(1)
    gain, imagined_gain = data["real_gain"].mean(1), data["imagined_gain"].mean(1)
    rank = interval(lambda i: stats.spearman(real[i], imagined[i]), init)
    of = {str(p): policy == p for p in np.unique(policy)}
    return {
        "gate": "b: closed loop",
        "cells": len(real), "rollouts_a_cell": int(data["real"].shape[1]), "inits": len(np.unique(init)),
        "rank_correlation": rank,
        "cells_with_a_success": int((real > 0).sum()),  # at the floor of success, progress tells more
        "rank_correlation_of_progress_gain": interval(lambda i: stats.spearman(gain[i], imagined_gain[i]), init),
        "rank_correlation_of_passing": interval(lambda i: stats.spearman(passed[i], imagined_passed[i]), init),
        "rank_correlation_within_task": {
            int(t): {
                "success": stats.spearman(real[task == t], imagined[task == t]),
                "passing": stats.spearman(passed[task == t], imagined_passed[task == t]),
            }
            for t in np.unique(task)
        },
        "rank_correlation_within_policy": {p: stats.spearman(real[i], imagined[i]) for p, i in of.items()},
        "policies": {
            p: {"real": float(real[i].mean()), "imagined": float(imagined[i].mean()),
                "real_passed": float(passed[i].mean()), "imagined_passed": float(imagined_passed[i].mean())}
            for p, i in of.items()
        },
        "passed": {"rank correlation >= 0.6": rank["value"] >= 0.6, ">= 8 rollouts a cell": data["real"].shape[1] >= 8},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gate", choices=("replays", "closed_loop"))
    parser.add_argument("--world_model")
    parser.add_argument("--segments")
    parser.add_argument("--cells")
    parser.add_argument("--output", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {"replays": replays, "closed_loop": closed_loop}[args.gate](args)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
