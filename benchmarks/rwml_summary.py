"""Rows of results/rwml from run folders of `vla-wmrl text rwml`, beside what phrases without facts score. Run:

    python benchmarks/rwml_summary.py --runs base=RUN/eval_before "WM SFT=RUN/eval_after" --train_env_steps=1800 \\
        --agent=random --output_dir results/rwml

NAME=FILE names an evaluation (without .jsonl); a model named "base" saw no environment. All must be of the same
triplets; rows and lines of other agents (whose triplets they are), seeds and splits that the output has are kept.
Accuracy is given at each --taus; the first is the one trained on. Differences to the first evaluation are paired
(McNemar, exact). Beside all triplets: those whose next state the prompt determines (`text_agents.rwml.known`), and of
these the ones that need what was seen before. "memory" is that rule's own prediction, "phrases" where it has none.
Without tags there is no prediction; "_untagged_too" takes a whole reply as one where there are none.
"""

from __future__ import annotations

import argparse
import json
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
    parser.add_argument("--agent", default="returning", help="whose triplets these are")
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
    said = {"phrases": [phrase(a) for a in actions]}
    known = np.array([found[first][i].get("known") or "" for i in ids])
    if known.any():
        said["memory"] = [found[first][i]["foretold"] or p for i, p in zip(ids, said["phrases"], strict=True)]
    distance = {name: embedder.distances(texts, true) for name, texts in said.items()}
    exact = {name: np.array([p == t for p, t in zip(texts, true, strict=True)]) for name, texts in said.items()}
    untrained, rules = (*said, "base"), (*said, first)
    subsets = {"": np.ones(len(ids), bool)}
    subsets |= {name: of for name, of in (("_known", known != ""), ("_known_history", known == "history")) if of.any()}
    for name, rows in found.items():
        distance[name] = np.array([np.inf if rows[i]["distance"] is None else rows[i]["distance"] for i in ids])
        exact[name] = np.array([rows[i]["exact"] for i in ids])

    table = []

    def add(method: str, metric: str, right: np.ndarray, **more) -> None:
        low, high = stats.wilson(int(right.sum()), len(right))
        table.append({
            "env": "alfworld", "agent": args.agent, "method": method, "seed": args.seed, "split": args.split, "metric": metric,
            "value": float(right.mean()), "low": low, "high": high, "n": len(right),
            "train_env_steps": 0 if method in untrained else args.train_env_steps, **more,
        })  # fmt: skip

    for method, far in distance.items():
        for subset, of in subsets.items():
            for tau in args.taus:
                right = far[of] < tau
                p = stats.mcnemar(distance[first][of] < tau, right)
                add(
                    method, f"next_state_accuracy{subset}_tau_{tau}", right, **({} if method in rules else {"p_vs_" + first: p})
                )
        add(method, "exact", exact[method])
        if method in found:
            add(method, "tagged", np.isfinite(far))
    rows = found[first]
    whole = [rows[i]["predicted"] or (rows[i]["output"] or "").rpartition("</think>")[2] for i in ids]
    for tau in args.taus:
        add(first, f"next_state_accuracy_tau_{tau}_untagged_too", embedder.distances(whole, true) < tau)
    this = {"env": "alfworld", "agent": args.agent, "seed": args.seed, "split": args.split}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "summary.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    write_json(path, [row for row in kept if any(row.get(k) != v for k, v in this.items())] + table)
    path = args.output_dir / "predictions.jsonl"
    lines = JsonLines(path, keep=lambda row: any(row.get(k) != v for k, v in this.items()))
    for name, rows in found.items():
        for i in ids:
            lines.write({"method": name, **this, **rows[i]})
    lines.close()
    for row in table:
        print(f"{row['method']:12s} {row['metric']:44s} {row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}] n={row['n']}")


if __name__ == "__main__":
    main()
