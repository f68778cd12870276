"""The floors of WMRL's theorems, measured where the optimum is known (methods.md 2.4).

A quadratic, gradient-dominated with constant 1, and score-function gradients: actions a ~ N(theta, s^2 I) in R^2,
outcome r = 1 - |a|^2 / 2 + risk(a) luck with luck = +-1, so J* - J(theta) = |theta|^2 / 2. The world model sees it
through a convex map and noise, r_wm = r + bias * softplus(4 (r - 1)) + noise * N(0, 1): it is fond of luck, and its
optimum lies where luck is large.

    T1 (world model only):  bias floor ~ B^2 and variance floor ~ step * V_WM, whatever the number of steps T
    T2 (WMRL):              bias floor -> 0 as anchor pairs accumulate, variance floor ~ step / (1 / V_WM + 1 / V_E)

E |theta|^2 / 2 = |E theta|^2 / 2 + tr Var(theta) / 2 over seeds tells the bias floor from the variance floor. Noise 0.1
is the theorem's case (f can invert the bias). Noise 0.4 shows what isotonic calibration cannot do: f = E[r | r_wm] is
then right on average over the buffer's actions, not for each action, and only "ppi" stays unbiased. Run:

    python benchmarks/theory.py --output_dir results/theory
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path

import numpy as np

from vla_wmrl.advantage import group_advantages
from vla_wmrl.anchors import choose
from vla_wmrl.debias import IsotonicDebiaser
from vla_wmrl.fusion import Fusion

DIM, GROUPS, G, SPREAD, STEP = 2, 8, 8, 0.5, 0.05
START = np.array([-1.5, 1.5])
ARMS = {  # anchor fraction, calibration, fusion
    "real": (1.0, False, "none"),
    "anchors only": (0.125, False, "ppi"),  # ppi before its warm-up, with lam = 0: the real groups alone
    "wm (T1)": (0.0, False, "none"),
    "mix": (0.125, False, "none"),
    "denoise": (0.125, False, "inverse_variance"),
    "debias": (0.125, True, "none"),
    "wmrl (T2)": (0.125, True, "inverse_variance"),
    "reliability": (0.125, True, "reliability"),
    "ppi": (0.125, True, "ppi"),
}

NO_WORLD_MODEL = ("real", "anchors only")


def outcome(action: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Real reward [...] of actions [..., DIM]; luck grows along the first axis."""
    risk = 1.0 / (1.0 + np.exp(-2.0 * action[..., 0]))
    return 1.0 - 0.5 * np.sum(action**2, axis=-1) + risk * rng.choice([-1.0, 1.0], size=action.shape[:-1])


def world_model(r: np.ndarray, bias: float, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Score of outcome r: monotone and convex in it (softplus), blurred by noise."""
    return r + bias * np.logaddexp(0.0, 4.0 * (r - 1.0)) + noise * rng.normal(size=r.shape)


def run(arm: str, seed: int, steps: int, bias: float, noise: float) -> tuple[np.ndarray, dict[str, float]]:
    """theta [steps, DIM] along one run, and the last fusion statistics."""
    fraction, calibrate, kind = ARMS[arm]
    rng = np.random.default_rng([seed, *arm.encode()])
    debias = IsotonicDebiaser(min_pairs=40, refit_every=160, max_pairs=2000)
    fusion = Fusion(kind, min_groups=10**9 if arm == "anchors only" else 4)
    theta, path = START.copy(), np.empty((steps, DIM))
    for step in range(steps):
        anchor = choose(seed, step, GROUPS, fraction)
        action = theta + SPREAD * rng.normal(size=(GROUPS, G, DIM))
        r = outcome(action, rng)
        r_wm = world_model(r, bias, noise, rng)
        f = debias.transform(r_wm) if calibrate else r_wm
        everywhere = np.ones((GROUPS, G), bool)
        a_real, a_wm = group_advantages(r, everywhere)[0], group_advantages(f, everywhere)[0]
        w = fusion.weights(int(anchor.sum()), int((~anchor).sum()), wm_ok=debias.ready or not calibrate)
        advantage = np.where(anchor[:, None], w.anchor * a_real + w.twin * a_wm, w.wm * a_wm)
        score = (action - theta) / SPREAD**2
        theta = theta + STEP * np.mean(advantage[..., None] * score, axis=(0, 1)) * G / (G - 1)  # group baseline's factor
        path[step] = theta
        if anchor.any():
            if kind != "none":
                fusion.observe(f[anchor], r[anchor])
            if calibrate:
                pairs = np.column_stack([r_wm[anchor].ravel(), r[anchor].ravel()])
                debias.observe(pairs, np.repeat(step * GROUPS + np.flatnonzero(anchor), G))
    return path, fusion.statistics()


def floors(paths: np.ndarray, tail: int) -> dict[str, float]:
    """From theta [seeds, steps, DIM]: suboptimality over the last `tail` steps with a 95 % interval, and its two parts.

    The bias part is |mean theta|^2 / 2 less what seeds alone would give; the variance part is the rest.
    """
    late = paths[:, -tail:]
    gap = 0.5 * np.sum(late**2, axis=-1).mean(axis=1)
    centre = late.mean(axis=1)
    bias = 0.5 * np.sum(centre.mean(axis=0) ** 2) - 0.5 * np.sum(centre.var(axis=0, ddof=1)) / len(centre)
    half = 1.96 * gap.std(ddof=1) / np.sqrt(len(gap))
    return {
        "suboptimality": float(gap.mean()),
        "low": float(gap.mean() - half),
        "high": float(gap.mean() + half),
        "bias_floor": float(bias),
        "variance_floor": float(gap.mean() - bias),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    started, rows, curves, statistics = time.process_time(), [], {}, {}
    # Every arm at the full bias; the theorems' arms at smaller ones too: T1's floor grows with the bias, T2's does not.
    cells = [(arm, 1.0, noise) for noise in (0.1, 0.4) for arm in ARMS if noise == 0.1 or arm not in NO_WORLD_MODEL]
    cells += [(arm, bias, 0.1) for bias in (0.0, 0.5) for arm in ("wm (T1)", "wmrl (T2)")]
    for arm, bias, noise in cells:
        runs = [run(arm, seed, args.steps, bias, noise) for seed in range(args.seeds)]
        paths = np.stack([path for path, _ in runs])
        if bias == 1.0:
            curves[arm, noise] = 0.5 * np.sum(paths**2, axis=-1)
            if ARMS[arm][2] != "none":
                statistics[f"{arm}, noise {noise}"] = {k: float(np.mean([s[k] for _, s in runs])) for k in runs[0][1]}
        for steps in (args.steps // 4, args.steps // 2, args.steps):
            figures = floors(paths[:, :steps], tail=args.steps // 8)
            rows.append({"arm": arm, "bias": bias, "noise": noise, "steps": steps, "seeds": args.seeds, **figures})
        print(f"{arm:14s} bias {bias:3.1f} noise {noise:3.1f}  J* - J = {rows[-1]['suboptimality']:.4f}", flush=True)

    with open(args.output_dir / "floors.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    summary = {
        "problem": {"dim": DIM, "groups": GROUPS, "group_size": G, "action_sd": SPREAD, "step": STEP},
        "seeds": list(range(args.seeds)),
        "steps": args.steps,
        "cpu_s": round(time.process_time() - started, 1),
        "fusion_statistics": {arm: {k: round(v, 4) for k, v in s.items()} for arm, s in statistics.items()},
    }
    (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot(curves, rows, args.steps, args.output_dir / "floors.png")


def plot(curves: dict[tuple[str, float], np.ndarray], rows: list[dict], steps: int, path: Path) -> None:
    """J* - J over steps (mean of seeds) at both noises; floors of T1 and T2 over the world model's bias."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (*panels, right) = plt.subplots(1, 3, figsize=(15, 4))
    window = max(steps // 40, 1)
    for panel, noise in zip(panels, (0.1, 0.4), strict=True):
        for arm in ARMS:
            gaps = curves[arm, 0.1 if arm in NO_WORLD_MODEL else noise]
            smooth = gaps[:, : steps // window * window].mean(axis=0).reshape(-1, window).mean(axis=1)
            panel.plot((np.arange(len(smooth)) + 0.5) * window, smooth, label=arm, lw=2.5 if "T" in arm else 1.2)
        panel.set(yscale="log", xlabel="policy updates", ylabel="J* - E J(theta)", title=f"bias 1, noise {noise}")
        panel.legend(fontsize=8, ncol=2)
    for arm, colour in (("wm (T1)", "tab:red"), ("wmrl (T2)", "tab:blue")):
        cells = sorted((r for r in rows if (r["arm"], r["steps"], r["noise"]) == (arm, steps, 0.1)), key=lambda r: r["bias"])
        for part, style in (("bias_floor", "o-"), ("variance_floor", "s--")):
            label = f"{arm} {part.replace('_', ' ')}"
            right.plot([r["bias"] for r in cells], [r[part] for r in cells], style, color=colour, label=label)
    right.set(xlabel="bias of the world model", ylabel="part of J* - E J", title=f"floors after {steps} updates, noise 0.1")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
