"""Rows of results/rwml from run folders of `vla-wmrl text rwml`, beside what phrases without facts score. Run:

    python benchmarks/rwml_summary.py --runs base=RUN/eval_before "WM SFT=RUN/eval_after" --train_env_steps=1800 \\
        --output_dir results/rwml

NAME=FILE names an evaluation (without .jsonl). All must be of the same triplets. Accuracy is given at each --taus; the first
is the one trained on. Differences to the first evaluation are paired (McNemar, exact).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from text_agents.rwml.rewards import Embedder
from vla_wmrl import stats
from vla_wmrl.tracking import JsonLines, read_jsonl, write_json


def phrase(action: str) -> str:
    """What fits an action without knowing the room."""
    place = action.removeprefix("go to ")
    return f"You arrive at {place}. On the {place}, you see nothing." if place != action else "Nothing happens."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True)
    parser.add_argument("--taus", nargs="+", type=float, default=[0.1, 0.2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", default="valid_unseen")
    parser.add_argument("--train_env_steps", type=int, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()

    found = {}
    for item in args.runs:
        name, _, path = item.partition("=")
        found[name] = {row["id"]: row for row in read_jsonl(f"{path}.jsonl")}
    first = next(iter(found))
    ids = sorted(found[first])
    for name, rows in found.items():
        if sorted(rows) != ids:
            raise SystemExit(f"{name} was evaluated on other triplets than {first}")
    true, actions = ([found[first][i][key] for i in ids] for key in ("true", "action"))
    embedder = Embedder()
    distance = {"phrases": embedder.distances([phrase(a) for a in actions], true)}
    exact = {"phrases": np.array([phrase(a) == t for a, t in zip(actions, true, strict=True)])}
    for name, rows in found.items():
        distance[name] = np.array([np.inf if rows[i]["distance"] is None else rows[i]["distance"] for i in ids])
        exact[name] = np.array([rows[i]["exact"] for i in ids])

    table = []

    def add(method: str, metric: str, right: np.ndarray, **more) -> None:
        low, high = stats.wilson(int(right.sum()), len(right))
        table.append({
            "env": "alfworld", "method": method, "seed": args.seed, "split": args.split, "metric": metric,
            "value": float(right.mean()), "low": low, "high": high, "n": len(right),
            "train_env_steps": 0 if method in (first, "phrases") else args.train_env_steps, **more,
        })  # fmt: skip

    for method, far in distance.items():
        for tau in args.taus:
            right = far < tau
            more = {} if method in (first, "phrases") else {"p_vs_" + first: stats.mcnemar(distance[first] < tau, right)}
            add(method, f"next_state_accuracy_tau_{tau}", right, **more)
        add(method, "exact", exact[method])
        if method != "phrases":
            add(method, "tagged", np.isfinite(far))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(args.output_dir / "summary.json", table)
    path = args.output_dir / "predictions.jsonl"
    path.unlink(missing_ok=True)
    lines = JsonLines(path)
    for name, rows in found.items():
        for i in ids:
            lines.write({"method": name, "seed": args.seed, "split": args.split, **rows[i]})
    lines.close()
    for row in table:
        print(f"{row['method']:12s} {row['metric']:28s} {row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}] n={row['n']}")


if __name__ == "__main__":
    main()
