"""Seeded generators of solutions: any specification, sound ones, and programs with one of the mistakes people make.

For the fidelity data and for warm starts: a world model is judged on programs that fail in many ways and places.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from text_agents.autoresearch.pipeline import sample, sample_sound
from text_agents.autoresearch.render import Facts, render

SHARES = {"any": 0.35, "sound": 0.35, "mistake": 0.3}
Edit = Callable[[str, Facts, np.random.Generator], str]


@dataclass(frozen=True)
class Solution:
    """One generated program; `source` says how it was made, the true outcome is for the sandbox to say."""

    source: str
    code: str


def _without_line(code: str, pattern: str, rng: np.random.Generator) -> str:
    lines = code.splitlines(keepends=True)
    found = [i for i, line in enumerate(lines) if re.match(pattern, line)]
    if found:
        del lines[found[rng.integers(len(found))]]
    return "".join(lines)


def _before_writing(code: str, line: str) -> str:
    return code.replace("submission.to_csv", f"{line}\nsubmission.to_csv")


def _broken_syntax(code: str, facts: Facts, rng: np.random.Generator) -> str:
    at = [m.start() for m in re.finditer(r"[)\]:]", code)]
    position = at[rng.integers(len(at))]
    return code[:position] + code[position + 1 :]


MISTAKES: dict[str, Edit] = {
    "missing import": lambda c, f, r: _without_line(c, r"(from sklearn|import numpy|import pandas)", r),
    "wrong column": lambda c, f, r: c.replace(f'train["{f.target}"]', f'train["{f.target.title()}"]'),
    "wrong file": lambda c, f, r: c.replace('"test.csv"', '"test_data.csv"'),
    "wrong variable": lambda c, f, r: c.replace("to_csv(os.environ", "to_csv(environ"),
    "target among the features": lambda c, f, r: c.replace("in test.columns if c in train.columns and", "in train.columns if"),
    "broken syntax": _broken_syntax,
    "nothing written": lambda c, f, r: _without_line(c, "submission.to_csv", r),
    "written with an index": lambda c, f, r: c.replace(", index=False)", ")"),
    "no id": lambda c, f, r: _before_writing(c, f'submission = submission.drop(columns="{f.id_column}")'),
    "rows missing": lambda c, f, r: _before_writing(c, "submission = submission.dropna().head(100)"),
    "empty predictions": lambda c, f, r: _before_writing(c, "submission.iloc[:5, 1:] = np.nan"),
    "renamed column": lambda c, f, r: _before_writing(c, 'submission.columns = ["id", *submission.columns[1:].str.upper()]'),
    "rows shuffled": lambda c, f, r: _before_writing(c, "submission = submission.sample(frac=1, random_state=1)"),  # harmless
    "predictions shuffled": lambda c, f, r: _before_writing(
        c, "submission.iloc[:, 1:] = submission.iloc[::-1, 1:].to_numpy()"
    ),  # runs, and is worthless
    "too slow": lambda c, f, r: c.replace(
        "submission = pd", "while len(train) > 10:\n    train = train.copy()\nsubmission = pd", 1
    ),
}
RARE = {"too slow": 0.15}  # costs its whole time limit


def generate(facts: Facts, n: int, seed: int) -> list[Solution]:
    """`n` programs for a task; the i-th depends on (seed, i) alone, so a longer list starts like a shorter one."""
    found = []
    for i in range(n):
        rng = np.random.default_rng([seed, i])
        source = list(SHARES)[int(np.searchsorted(np.cumsum(list(SHARES.values())), rng.random()))]
        spec = sample(facts.kind, rng) if source == "any" else sample_sound(facts.kind, rng, facts.labels)
        code = render(spec, facts)
        if source == "mistake":
            names = [name for name in MISTAKES if rng.random() < RARE.get(name, 1.0)]
            name = names[rng.integers(len(names))]
            source, code = f"mistake: {name}", MISTAKES[name](code, facts, rng)
        found.append(Solution(source, code))
    return found
