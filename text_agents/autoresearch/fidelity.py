"""How well a world model foretells executions: against true outcomes, always-majority and a complexity heuristic.

A predictor that is fitted (majority, complexity, text) is fitted on other tasks than those it is judged on, and so is
the calibration: nothing is scored on a task it has learned from."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from vla_wmrl import stats
from vla_wmrl.debias import IsotonicDebiaser
from vla_wmrl.errors import UserError, require
from vla_wmrl.world_model.language import (
    BUCKETS,
    STATUSES,
    Case,
    Outcome,
    Prediction,
    bucket_of,
    certain,
    compile_gate,
)

FOLDS = 5
COLUMNS = ("task", "code", "status", "reward", "description", "inventory", "brief")
Fit = Callable[[Sequence[Case], pd.DataFrame], Callable[[Sequence[Case]], list[Prediction]]]


def read_rows(path: str | Path) -> pd.DataFrame:
    """Graded rows of the data file (ungraded ones have no truth). Raises UserError where it is none."""
    path = Path(path)
    require(path.is_file(), f"no file {path}: make it with benchmarks/research_fidelity.py")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is not JSON") from error
    tasks = {r["task"]: r for r in rows if "inventory" in r}  # a task's texts are on their own line
    table = pd.DataFrame([{**tasks.get(r["task"], {}), **r} for r in rows if "code" in r])
    require(len(table) > 0, f"{path} has no solutions")
    missing = [c for c in COLUMNS if c not in table.columns]
    require(not missing, f"{path} lacks {', '.join(missing)}")
    return table[table["status"].isin(STATUSES)].reset_index(drop=True)


def cases_of(rows: pd.DataFrame) -> list[Case]:
    names = ("task", "description", "inventory", "brief", "code")
    return [Case(*values) for values in rows[list(names)].itertuples(index=False)]


def figures(rows: pd.DataFrame, predictions: Sequence[Prediction | None]) -> dict[str, float]:
    """status@1, status@2, and of the expected reward: MAE, rank correlation (all, mean within tasks), ECE, before and
    after calibration on other tasks. Missing predictions are counted and left out."""
    have = np.array([p is not None for p in predictions])
    kept = [p for p in predictions if p is not None]
    true, task = rows["reward"].to_numpy(np.float64)[have], rows["task"].to_numpy()[have]
    status = rows["status"].to_numpy()[have]
    result = {"n": float(len(rows)), "missing": float((~have).sum())}
    if not kept:
        return result
    order = np.argsort(-np.stack([p.p_status for p in kept]), axis=1, kind="stable")
    named = np.array(STATUSES)[order]
    result["status_at_1"] = float(np.mean(named[:, 0] == status))
    result["status_at_2"] = float(np.mean((named[:, :2] == status[:, None]).any(axis=1)))
    groups = np.unique(task, return_inverse=True)[1]
    expected, top = (np.array([getattr(p, name) for p in kept]) for name in ("reward", "reward_top"))
    result["mae_top"] = float(np.mean(np.abs(top - true)))
    calibrator = IsotonicDebiaser(max_pairs=max(2000, len(true)), folds=FOLDS)
    after = calibrator.out_of_fold(np.column_stack([expected, true]), groups)
    for name, values in (("before", expected), ("after", after)):
        # a constant says nothing about its task: that is no correlation, and leaving it out would flatter it
        varied = [groups == g for g in np.unique(groups) if np.ptp(true[groups == g]) > 0]
        within = np.nan_to_num([stats.spearman(values[g], true[g]) for g in varied])
        result[f"{name}_mae"] = float(np.nanmean(np.abs(values - true))) if np.isfinite(values).any() else float("nan")
        result[f"{name}_spearman"] = stats.spearman(values, true)
        result[f"{name}_spearman_within_task"] = float(np.mean(within)) if len(within) else float("nan")
        result[f"{name}_ece"] = stats.ece(values, true)
    return result


def across_tasks(fit: Fit, rows: pd.DataFrame, cases: Sequence[Case]) -> list[Prediction | None]:
    """Predictions of a fitted predictor, each fitted on the folds without its task; the compile gate first."""
    fold = np.unique(rows["task"], return_inverse=True)[1] % FOLDS
    results: list[Prediction | None] = [None] * len(cases)
    for k in np.unique(fold):
        rest, held = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        if len(rest):
            predict = fit([cases[i] for i in rest], rows.iloc[rest])
            for i, prediction in zip(held, predict([cases[i] for i in held]), strict=True):
                known = compile_gate(cases[i].code)
                results[i] = certain(known) if known else prediction
    return results


def _prediction(p_status: np.ndarray, p_bucket: np.ndarray) -> Prediction:
    first, second = np.argsort(-p_status, kind="stable")[:2]
    bucket = BUCKETS[int(np.argmax(p_bucket))]
    outcomes = [
        Outcome(
            STATUSES[i],
            None,
            None,
            bucket if STATUSES[i] == "valid" else None,
            f"Predicted: {STATUSES[i]}.",
            float(p_status[i]),
        )
        for i in (first, second)
    ]
    return Prediction(tuple(outcomes), p_status, p_bucket)


def _frequencies(values: Sequence, names: Sequence[str]) -> np.ndarray:
    counts = np.array([np.sum(np.asarray(values, object) == name) for name in names], np.float64)
    return counts / counts.sum() if counts.sum() else np.full(len(names), 1 / len(names))


def _valid_buckets(rows: pd.DataFrame) -> np.ndarray:
    return np.array([bucket_of(2 * r - 1) for r in rows.loc[rows["status"] == "valid", "reward"]], object)


def fit_majority(cases: Sequence[Case], rows: pd.DataFrame) -> Callable[[Sequence[Case]], list[Prediction]]:
    """Always the frequencies of the fitting rows: the first outcome is the majority's."""
    fixed = _prediction(_frequencies(rows["status"], STATUSES), _frequencies(_valid_buckets(rows), BUCKETS))
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
            found.append(_prediction(p_status, p_bucket))
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
        return [_prediction(s, b) for s, b in zip(p_status, p_bucket, strict=True)]

    return predict


PREDICTORS: dict[str, Fit] = {"majority": fit_majority, "complexity": fit_complexity, "text": fit_text}
