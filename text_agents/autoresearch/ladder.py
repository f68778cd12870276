"""The ladder of baselines whose scores are the reference boards of embedded tasks: seeded specifications and blends
of them.

A board has the scores of `FITS` different specifications that run (from a dummy to tuned boosting, on all, half or a
tenth of the rows) and of `BLENDS` mean predictions or majority votes of a few of them, as competitors blend: one half
of two or three of any family, the other of two to eight of the stronger families. Members are drawn by seed, never by
their score on the hidden answers. The largest models of the language are left out: they cost the most, and leave room
above the ladder."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from text_agents.autoresearch.pipeline import Spec, from_choices, sample_sound, slots, to_choices
from text_agents.autoresearch.render import facts_of, render
from text_agents.autoresearch.tasks import Task
from vla_wmrl.errors import require

FITS, BLENDS = 44, 160
STRONG = ("boosting", "forest", "extra_trees", "logistic", "ridge", "svm")
FIT_LIMIT_S = 20  # a slower one is left out


def first_steps(kind: str, labels: bool) -> list[Spec]:
    """The plain start of every ladder: each model family with middle parameters and default preprocessing."""
    output = ("label" if labels else "probability") if kind == "classification" else "raw"
    families = slots(kind, ["all", "median", "standard", "onehot", "all"])[1]
    specs = []
    for model in families:
        if (kind, model) == ("regression", "poisson") or (kind == "classification" and model == "ridge" and not labels):
            continue
        plain = from_choices(kind, to_choices(Spec(kind, scale="standard", encode="onehot", model=model, output=output)))
        specs.append(plain)
    return specs


def candidates(kind: str, labels: bool, positive: bool, many_classes: bool, seed: int) -> Iterator[Spec]:
    """Endless: the first steps, then sound specifications, most of the strong families. positive: none below -1."""
    yield from first_steps(kind, labels)
    rng = np.random.default_rng(seed)
    while True:
        spec = sample_sound(kind, rng, labels)
        if spec.model == "dummy" or (spec.model not in STRONG and rng.random() < 0.4):
            continue
        if spec.model == "svm" and spec.scale == "none":
            continue  # does not converge on raw columns
        if spec.params.get("max_iter") == 200 or spec.params.get("n_estimators") == 120:
            continue
        if many_classes and spec.model == "boosting" and spec.params["max_iter"] > 30:
            continue  # a tree a class and iteration
        if kind == "regression" and positive and rng.random() < 0.5:
            chosen = to_choices(spec)
            chosen[-2] = "log1p"
            spec = from_choices(kind, chosen)
        yield spec


class TooSlow(Exception):
    pass


def run_here(code: str, task: Task, work: Path) -> pd.DataFrame | None:
    """Run one of our own programs in this process, without a sandbox; its submission, None where it fails."""
    path = work / "submission.csv"
    path.unlink(missing_ok=True)
    before = {name: os.environ.get(name) for name in ("DATA_DIR", "SUBMISSION_PATH")}
    os.environ.update(DATA_DIR=str(task.public), SUBMISSION_PATH=str(path))

    def stop(*_: object) -> None:
        raise TooSlow

    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, FIT_LIMIT_S)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            exec(compile(code, "baseline.py", "exec"), {"__name__": "__main__"})
        return pd.read_csv(path)
    except (TooSlow, ValueError, np.linalg.LinAlgError):
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def blend(tables: list[pd.DataFrame], labels: bool) -> pd.DataFrame:
    """Mean of the target columns, or the most frequent label, of submissions with the same rows."""
    result = tables[0].copy()
    for name in result.columns[1:]:
        votes = np.stack([t[name].to_numpy() for t in tables])
        if labels:  # of labels with as many votes the smallest
            names, index = np.unique(votes, return_inverse=True)
            counts = np.stack([(index.reshape(votes.shape) == k).sum(axis=0) for k in range(len(names))])
            result[name] = names[counts.argmax(axis=0)]
        else:
            result[name] = votes.mean(axis=0)
    return result


def climb(task: Task, seed: int = 0, fits: int = FITS, blends: int = BLENDS) -> pd.DataFrame:
    """The board: rank, score, entry (a specification, or the blended ones by number), best first."""
    facts = facts_of(task)
    target = pd.read_csv(task.public / "train.csv")[facts.target]
    positive = facts.kind == "regression" and bool((target > -1).all())
    many_classes = facts.kind == "classification" and target.nunique() > 3
    rows, submissions, strong, able = [], [], [], []
    tried: set[str] = set()
    with tempfile.TemporaryDirectory() as work:
        for spec in candidates(facts.kind, facts.labels, positive, many_classes, seed):
            text = spec.to_json()
            require(len(tried) < 6 * fits, f"{task.name}: only {len(rows)} of {len(tried)} baselines ran")
            if text in tried:
                continue
            tried.add(text)
            table = run_here(render(spec, facts), task, Path(work))
            grade = task.grade(table.to_csv(index=False).encode()) if table is not None else None
            if grade is None or not np.isfinite(grade.score):
                continue
            strong += [len(rows)] if spec.model in STRONG else []
            able += [len(rows)] if spec.model != "dummy" else []
            submissions.append(table)
            rows.append((grade.score, text))
            if len(rows) == fits:
                break
    rng = np.random.default_rng(seed + 1)
    for i in range(blends):
        pool, most = (able, 3) if i % 2 else (strong, 8)
        members = sorted(rng.choice(pool, size=min(int(rng.integers(2, most + 1)), len(pool)), replace=False))
        grade = task.grade(blend([submissions[i] for i in members], facts.labels).to_csv(index=False).encode())
        if np.isfinite(grade.score):
            rows.append((grade.score, "blend of " + " ".join(map(str, members))))
    board = pd.DataFrame(rows, columns=["score", "entry"])
    board = board.sort_values("score", ascending=not task.metric.higher_is_better, kind="stable").reset_index(drop=True)
    board.insert(0, "rank", np.arange(1, len(board) + 1))
    return board
