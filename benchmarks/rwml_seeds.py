"""Methods of next-state prediction over seeds, from the predictions that rwml_summary.py wrote. Run:

    python benchmarks/rwml_seeds.py --predictions=results/rwml_tiny/predictions.jsonl --against="WM SFT" \\
        --output=results/rwml_tiny/table.md

Accuracy at --tau as the mean over seeds, with the seeds beside it; differences to --against in points, paired by seed and
triplet, with a 95 % bootstrap interval over games (triplets of a game are no independent draws; seeds of a method share
them). "known": triplets whose next state the prompt determines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vla_wmrl.stats import paired_difference
from vla_wmrl.tracking import read_jsonl

MEASURES = ("right", "right, known", "exact words")


def measure(row: dict, name: str, tau: float) -> float | None:
    """1 or 0; None where the measure is not about this triplet."""
    if name == "right, known" and not row.get("known"):
        return None
    return float(row["exact"]) if name == "exact words" else float(row["distance"] is not None and row["distance"] < tau)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=Path, required=True)
    parser.add_argument("--tau", type=float, default=0.1)
    parser.add_argument("--against", required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    of: dict[tuple[str, str], dict[tuple[int, str], dict]] = {}  # (triplets, method) -> (seed, triplet) -> line
    for row in read_jsonl(args.predictions):
        of.setdefault((f"{row['agent']}, {row['split']}", row["method"]), {})[row["seed"], row["id"]] = row
    if not any(method == args.against for _, method in of):
        raise SystemExit(f"no predictions of {args.against!r}: there are {sorted({method for _, method in of})}")
    lines = ["| triplets | method | " + " | ".join(MEASURES) + f" | less {args.against} |", "|---" * (len(MEASURES) + 3) + "|"]
    for (triplets, method), rows in of.items():
        cells = []
        for name in MEASURES:
            by_seed: dict[int, list[float]] = {}
            for (seed, _), row in rows.items():
                value = measure(row, name, args.tau)
                if value is not None:
                    by_seed.setdefault(seed, []).append(value)
            means = [np.mean(values) for _, values in sorted(by_seed.items())]
            n = len(next(iter(by_seed.values()), []))
            cells.append(f"{np.mean(means):.1%} of {n} (" + ", ".join(f"{100 * m:.0f}" for m in means) + ")" if means else "")
        base = of.get((triplets, args.against), {})
        pairs = [key for key in rows if key in base]
        difference = ""
        if method != args.against and pairs:
            ours, theirs = (np.array([measure(some[key], "right", args.tau) for key in pairs]) for some in (rows, base))
            d = paired_difference(theirs, ours, np.array([rows[key]["task_id"] for key in pairs]))
            difference = f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"
        lines.append(f"| {triplets} | {method} | " + " | ".join(cells) + f" | {difference} |")
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
