"""A report on a task's data for a language world model's prompt, verified since it is what a program printed in the sandbox
(after predict-before-execute, arXiv 2601.05930). It tells what decides whether programs run: strings, gaps, categories that
only the test file has, values a logarithm refuses; and what decides how well they do: the target, and what goes with it."""

from __future__ import annotations

from collections.abc import Iterable

from text_agents.autoresearch.sandbox import Sandbox

CHARS = 2000  # of a report
PROGRAM = """
import os

import pandas as pd

folder = os.environ["DATA_DIR"]
train, test = (pd.read_csv(os.path.join(folder, f"{name}.csv")) for name in ("train", "test"))
shared = [c for c in train.columns if c in test.columns]
numbers = [c for c in shared if pd.api.types.is_numeric_dtype(train[c])]
strings = [c for c in shared if c not in numbers]
print(f"train {len(train)} rows, test {len(test)} rows; {len(numbers)} numeric and {len(strings)} string columns in both")
print("only in train:", ", ".join(c for c in train.columns if c not in shared) or "nothing")
print("string columns:", ", ".join(strings) or "none")
for name, table in (("train", train), ("test", test)):
    gaps = table[shared].isna().sum()
    print(f"missing values in {name}:", ", ".join(f"{c} {n}" for c, n in gaps[gaps > 0].items()) or "none")
new = {c: sorted(set(test[c].dropna()) - set(train[c].dropna())) for c in strings}
print("categories that only test has:", ", ".join(f"{c} {len(v)}" for c, v in new.items() if v) or "none")
print("constant columns:", ", ".join(c for c in shared if train[c].nunique() <= 1) or "none")
low = [c for c in numbers if min(train[c].min(), test[c].min()) < 0]
print("numeric columns with negative values:", ", ".join(low) or "none")
for target in [c for c in train.columns if c not in shared]:
    y = train[target]
    if pd.api.types.is_numeric_dtype(y) and y.nunique() > 20:
        values = {"min": y.min(), "median": y.median(), "mean": y.mean(), "max": y.max(), "skew": y.skew()}
        print(f"{target}:", ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    else:
        print(f"{target}:", ", ".join(f"{k} {v:.0%}" for k, v in y.value_counts(normalize=True).head(12).items()))
    ranks = y.rank() if pd.api.types.is_numeric_dtype(y) else y.astype("category").cat.codes
    with_target = train[numbers].rank().corrwith(ranks).dropna()
    top = with_target[with_target.abs().sort_values(ascending=False).index].head(8)
    print(f"rank correlation with {target}:", ", ".join(f"{c} {v:+.2f}" for c, v in top.items()) or "none")
"""


def reports(names: Iterable[str], sandbox: Sandbox) -> dict[str, str]:
    """Task -> report; tasks where the program fails (no train.csv, say) have none. `names`: of the sandbox's tasks."""
    names = list(names)
    results = sandbox.run_many([(name, PROGRAM) for name in names])
    done = {name: r for name, r in zip(names, results, strict=True) if r is not None and r.reason == "ok"}
    return {name: result.stdout[:CHARS] for name, result in done.items()}
