"""How well a world model foretells executions: against true outcomes, always-majority and a complexity heuristic.

A predictor that is fitted is fitted on other tasks than those it is judged on, and so is
the calibration: nothing is scored on a task it has learned from."""

from __future__ import annotations

import ast
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from text_agents.autoresearch.outcomes import fit_outcomes, prediction_of
from vla_wmrl import stats
from vla_wmrl.debias import IsotonicDebiaser
from vla_wmrl.errors import UserError, require
from vla_wmrl.world_model.language import (
    BUCKETS,
    STATUSES,
    Case,
    LanguageModel,
    LanguageWorldModel,
    Prediction,
    bucket_of,
    certain,
    compile_gate,
)

FOLDS = 5  # of the calibration
COLUMNS = ("task", "code", "status", "reward", "description", "inventory", "brief")
Fit = Callable[[Sequence[Case], pd.DataFrame], Callable[[Sequence[Case]], list[Prediction]]]


def read_rows(path: str | Path) -> pd.DataFrame:
    """Graded rows of the data file (ungraded ones have no truth). Raises UserError where it is none."""
    path = Path(path)
    require(path.is_file(), f"no file {path}: make it with benchmarks/research_fidelity.py")
    rows = []
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no file of executions: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is not JSON") from error
        require(isinstance(rows[-1], dict) and "task" in rows[-1], f"{path}, line {number}, names no task")
    tasks = {r["task"]: r for r in rows if "inventory" in r}  # a task's texts are on their own line
    table = pd.DataFrame([{**tasks.get(r["task"], {}), **r} for r in rows if "code" in r])
    require(len(table) > 0, f"{path} has no solutions")
    missing = [c for c in COLUMNS if c not in table.columns]
    require(not missing, f"{path} lacks {', '.join(missing)}")
    table["held_out"] = table["held_out"].astype(bool) if "held_out" in table.columns else False
    return table[table["status"].isin(STATUSES)].reset_index(drop=True)


def cases_of(rows: pd.DataFrame) -> list[Case]:
    names = ("task", "description", "inventory", "brief", "code")
    return [Case(*values) for values in rows[list(names)].itertuples(index=False)]


@dataclass(frozen=True)
class Judged:
    """Predictions beside the truth, for the n cases that have one. `after`: calibrated on other tasks."""

    status: np.ndarray  # [n] true status
    named: np.ndarray  # [n, 4] statuses, likeliest first
    task: np.ndarray  # [n]
    true: np.ndarray  # [n] reward
    top: np.ndarray  # [n] reward of the first outcome
    before: np.ndarray  # [n] expected reward
    after: np.ndarray  # [n], NaN where there was no other task to calibrate on

    def figures(self, index: np.ndarray | None = None) -> dict[str, float]:
        """status@1, status@2, reward MAE, rank correlation (all, mean within tasks), ECE; of the cases `index`."""
        rows = np.arange(len(self.true)) if index is None else index
        hit, true, task = self.named[rows] == self.status[rows, None], self.true[rows], self.task[rows]
        result = {"status_at_1": float(np.mean(hit[:, 0])), "status_at_2": float(np.mean(hit[:, :2].any(axis=1)))}
        result["mae_top"] = float(np.mean(np.abs(self.top[rows] - true)))
        # a constant says nothing about its task: that is no correlation, and leaving it out would flatter it
        varied = [g for g in (task == t for t in np.unique(task)) if np.ptp(true[g]) > 0]
        for name, values in (("before", self.before[rows]), ("after", self.after[rows])):
            known = np.isfinite(values).any()
            within = np.nan_to_num([stats.spearman(values[g], true[g]) for g in varied])
            result[f"{name}_mae"] = float(np.nanmean(np.abs(values - true))) if known else float("nan")
            result[f"{name}_spearman"] = stats.spearman(values, true)
            result[f"{name}_spearman_within_task"] = float(np.mean(within)) if len(within) else float("nan")
            result[f"{name}_ece"] = stats.ece(values, true)
        return result

    def intervals(self, n_boot: int = 300, seed: int = 0) -> dict[str, list[float]]:
        """95 % percentile-bootstrap intervals [low, high] of the figures, drawing whole tasks with replacement.

        Neither the predictor nor the calibration is fitted again: the spread is that of the judged tasks alone.
        """
        rng, members = np.random.default_rng(seed), [np.flatnonzero(self.task == t) for t in np.unique(self.task)]
        draws = []
        for _ in range(n_boot):
            chosen = rng.integers(len(members), size=len(members))
            draws.append(self.figures(np.concatenate([members[i] for i in chosen])))
        bounds = {k: np.nanquantile([d[k] for d in draws], [0.025, 0.975]) for k in draws[0] if np.isfinite(draws[0][k])}
        return {k: [float(low), float(high)] for k, (low, high) in bounds.items()}


def judged(rows: pd.DataFrame, predictions: Sequence[Prediction | None]) -> Judged | None:
    """Predictions [n] (None: missing) of graded rows [n] beside their truth; None where all are missing."""
    have = np.array([p is not None for p in predictions])
    kept = [p for p in predictions if p is not None]
    if not kept:
        return None
    rows = rows[have]
    true, task = rows["reward"].to_numpy(np.float64), rows["task"].to_numpy()
    order = np.argsort(-np.stack([p.p_status for p in kept]), axis=1, kind="stable")
    expected, top = (np.array([getattr(p, name) for p in kept]) for name in ("reward", "reward_top"))
    calibrator = IsotonicDebiaser(max_pairs=max(2000, len(true)), folds=FOLDS)
    after = calibrator.out_of_fold(np.column_stack([expected, true]), np.unique(task, return_inverse=True)[1])
    return Judged(rows["status"].to_numpy(), np.array(STATUSES)[order], task, true, top, expected, after)


def figures(rows: pd.DataFrame, predictions: Sequence[Prediction | None]) -> dict[str, float]:
    """`Judged.figures` of all rows, with their number. Missing predictions are counted and left out."""
    found = judged(rows, predictions)
    counts = {"n": float(len(rows)), "missing": float(sum(p is None for p in predictions))}
    return counts | (found.figures() if found else {})


def across_tasks(fit: Fit, rows: pd.DataFrame, cases: Sequence[Case]) -> list[Prediction | None]:
    """Predictions of a fitted predictor for each task, fitted on all the others (leave one task out); the compile gate
    first."""
    fold = np.unique(rows["task"], return_inverse=True)[1]
    return _predicted(fit, rows, cases, [(fold != k, fold == k) for k in np.unique(fold)])


def held_out(fit: Fit, rows: pd.DataFrame, cases: Sequence[Case]) -> list[Prediction | None]:
    """Predictions for the held-out tasks, fitted on the training tasks; None elsewhere."""
    held = rows["held_out"].to_numpy(bool)
    return _predicted(fit, rows, cases, [(~held, held)])


def _predicted(fit: Fit, rows: pd.DataFrame, cases: Sequence[Case], parts: Sequence[tuple]) -> list[Prediction | None]:
    """Predictions of the second mask's cases by a fit on the first one's, for each pair of masks [n]."""
    results: list[Prediction | None] = [None] * len(cases)
    for fitting, judged in parts:
        rest, held = np.flatnonzero(fitting), np.flatnonzero(judged)
        if len(rest):
            predict = fit([cases[i] for i in rest], rows.iloc[rest])
            for i, prediction in zip(held, predict([cases[i] for i in held]), strict=True):
                known = compile_gate(cases[i].code)
                results[i] = certain(known) if known else prediction
    return results


def _frequencies(values: Sequence, names: Sequence[str]) -> np.ndarray:
    counts = np.array([np.sum(np.asarray(values, object) == name) for name in names], np.float64)
    return counts / counts.sum() if counts.sum() else np.full(len(names), 1 / len(names))


def _valid_buckets(rows: pd.DataFrame) -> np.ndarray:
    return np.array([bucket_of(2 * r - 1) for r in rows.loc[rows["status"] == "valid", "reward"]], object)


def fit_majority(cases: Sequence[Case], rows: pd.DataFrame) -> Callable[[Sequence[Case]], list[Prediction]]:
    """Always the frequencies of the fitting rows: the first outcome is the majority's."""
    fixed = prediction_of(_frequencies(rows["status"], STATUSES), _frequencies(_valid_buckets(rows), BUCKETS))
    return lambda others: [fixed for _ in others]


def complexity(code: str) -> float:
    """Nodes of the syntax tree and, ten each, names imported; 0 for code that does not parse."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return 0.0
    return float(len(nodes) + 10 * sum(len(n.names) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)))


def fit_complexity(cases: Sequence[Case], rows: pd.DataFrame) -> Callable[[Sequence[Case]], list[Prediction]]:
    """Complexity wins: always the majority status, with quality by the rank of the program's complexity."""
    reference = np.sort([complexity(c.code) for c in cases])
    shares = _frequencies(rows["status"], STATUSES)
    p_status = 0.9 * np.eye(4)[int(np.argmax(shares))] + 0.1 * shares

    def predict(others: Sequence[Case]) -> list[Prediction]:
        ranks = np.searchsorted(reference, [complexity(c.code) for c in others]) / max(len(reference), 1)
        found = []
        for rank in ranks:  # between neighbouring buckets, so that the order is kept
            at = rank * (len(BUCKETS) - 1)
            low = min(int(at), len(BUCKETS) - 2)
            p_bucket = np.zeros(4)
            p_bucket[low], p_bucket[low + 1] = 1 - (at - low), at - low
            found.append(prediction_of(p_status, p_bucket))
        return found

    return predict


def words(case: Case) -> list[str]:
    """Words of a program, alone and joined with what its task is like (strings, gaps, kind of target)."""
    inventory = case.inventory
    facts = [f"strings={' values' in inventory}", f"gaps={' missing' in inventory}"]
    facts += [m for m in ("auc", "log_loss", "accuracy", "f1", "rmse", "rmsle") if f"Evaluation: {m}," in case.description]
    tokens = re.findall(r"[A-Za-z_][A-Za-z_0-9]*(?:=[\w.\"]+)?|\.\w+|\w+", case.code)
    pairs = [" ".join(p) for p in itertools.pairwise(tokens)]
    return [*tokens, *pairs, *(f"{fact}&{token}" for fact in facts for token in set(tokens)), *facts]


def fit_text(cases: Sequence[Case], rows: pd.DataFrame) -> Callable[[Sequence[Case]], list[Prediction]]:
    """Logistic regression on the words of program and task: what can be told without reading, in seconds on a CPU."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectors = TfidfVectorizer(analyzer=words, min_df=3, binary=True, sublinear_tf=True)
    X = vectors.fit_transform(cases)
    model = LogisticRegression(C=30.0, max_iter=200).fit(X, rows["status"])
    valid = np.flatnonzero((rows["status"] == "valid").to_numpy())
    buckets = _valid_buckets(rows)
    quality = LogisticRegression(C=3.0, max_iter=200).fit(X[valid], buckets) if len(set(buckets)) > 1 else None

    def spread(p: np.ndarray, known: np.ndarray, names: Sequence[str]) -> np.ndarray:
        full = np.zeros((len(p), len(names)))
        full[:, [names.index(k) for k in known]] = p
        return full

    def predict(others: Sequence[Case]) -> list[Prediction]:
        Z = vectors.transform(others)
        p_status = spread(model.predict_proba(Z), model.classes_, STATUSES)
        p_bucket = np.tile(_frequencies(buckets, BUCKETS), (len(others), 1))
        if quality is not None:
            p_bucket = spread(quality.predict_proba(Z), quality.classes_, BUCKETS)
        return [prediction_of(s, b) for s, b in zip(p_status, p_bucket, strict=True)]

    return predict


def fit_language(model: LanguageModel, max_tokens: int) -> Fit:
    """A language model, as it comes: nothing is fitted, and a program is asked about once, whatever the protocol."""
    world, known = LanguageWorldModel(model, max_tokens=max_tokens), {}

    def predict(others: Sequence[Case]) -> list[Prediction | None]:
        new = list(dict.fromkeys(case for case in others if case not in known))
        known.update(zip(new, world.predict(new), strict=True))
        return [known[case] for case in others]

    return lambda cases, rows: predict


PREDICTORS: dict[str, Fit] = {
    "majority": fit_majority,
    "complexity": fit_complexity,
    "text": fit_text,
    "boosting": fit_outcomes("boosting"),
    "forest": fit_outcomes("forest"),
}
