"""Metrics that grade a submission against the hidden answers, with a grader's messages for what cannot be graded.

A metric is anything with `name`, `higher_is_better`, `validate(submission, answers)` and `evaluate(submission,
answers)`, both tables with the id in the first column. `TableMetric` is ours; `DojoMetric` wraps the class of a
task's own `metric.py` in MLE-Dojo's form.

Non-obvious behaviour
* Rows are matched by id, so their order does not matter; columns are matched by name.
* Several target columns are class probabilities; each row is rescaled to sum 1, as Kaggle does.
* `DojoMetric` runs the code of `metric.py`: it belongs to the task, whoever prepared the folder is trusted.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import pandas as pd
from sklearn import metrics as sk

from vla_wmrl.errors import UserError, nearest, require

Values = Literal["number", "count", "probability", "label"]


class SubmissionError(Exception):
    """The submission cannot be graded; the message is what a grader tells a participant."""


class MetricError(Exception):
    """The metric itself failed (NaN, an exception of its own) on a submission it had accepted: nobody was graded."""


class Metric(Protocol):
    name: str
    higher_is_better: bool

    def validate(self, submission: pd.DataFrame, answers: pd.DataFrame) -> None: ...

    def evaluate(self, submission: pd.DataFrame, answers: pd.DataFrame) -> float: ...


@dataclass(frozen=True)
class Rule:
    """How a metric reads numbers: `score(truth, predicted)` on arrays [n] (or [n, classes]), and what it takes."""

    score: Callable[[np.ndarray, np.ndarray], float]
    higher_is_better: bool
    values: Values


def _rmse(truth: np.ndarray, predicted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((predicted - truth) ** 2)))


def _log_loss(truth: np.ndarray, predicted: np.ndarray) -> float:
    p = np.clip(predicted, 1e-15, 1 - 1e-15)
    if p.ndim == 1:
        return float(-np.mean(np.where(truth > 0.5, np.log(p), np.log1p(-p))))
    return float(-np.mean(np.sum(truth * np.log(p / p.sum(axis=1, keepdims=True)), axis=1)))


def _f1(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Of the class "1" where labels are 0 and 1, otherwise the mean over classes."""
    binary = set(truth) <= {"0", "1"}
    options = {"pos_label": "1"} if binary else {"average": "macro"}
    if binary and not set(predicted) <= {"0", "1"}:
        options = {"average": "macro"}
    return float(sk.f1_score(truth, predicted, zero_division=0.0, **options))


METRICS: dict[str, Rule] = {
    "auc": Rule(lambda t, p: float(sk.roc_auc_score(t, p)), True, "number"),
    "log_loss": Rule(_log_loss, False, "probability"),
    "accuracy": Rule(lambda t, p: float(np.mean(t == p)), True, "label"),
    "f1": Rule(_f1, True, "label"),
    "rmse": Rule(_rmse, False, "number"),
    "rmsle": Rule(lambda t, p: _rmse(np.log1p(t), np.log1p(p)), False, "count"),
    "mae": Rule(lambda t, p: float(np.mean(np.abs(t - p))), False, "number"),
}


def labels(column: pd.Series) -> np.ndarray:
    """Labels [n] as text; 1, 1.0 and "1" are the same label."""
    numbers = pd.to_numeric(column, errors="coerce")
    text = column.astype(str).str.strip()
    whole = numbers.notna() & np.isfinite(numbers.fillna(np.inf)) & (numbers == numbers.round())
    return np.where(whole, numbers.where(whole, 0).astype(np.int64).astype(str), text).astype(object)


def _few(values: list) -> str:
    shown = ", ".join(map(str, values[:3]))
    return shown + (f" and {len(values) - 3} more" if len(values) > 3 else "")


@dataclass(frozen=True)
class TableMetric:
    """A metric of METRICS over the target columns of the answers."""

    name: str

    def __post_init__(self) -> None:
        require(self.name in METRICS, f"unknown metric {self.name!r}{nearest(self.name, list(METRICS))}")

    @property
    def higher_is_better(self) -> bool:
        return METRICS[self.name].higher_is_better

    def validate(self, submission: pd.DataFrame, answers: pd.DataFrame) -> None:
        """Raises SubmissionError with the first thing that is wrong."""
        self._aligned(submission, answers)

    def evaluate(self, submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        """The score. Raises SubmissionError for what `validate` refuses, MetricError when the score is not finite."""
        truth, predicted = self._aligned(submission, answers)
        try:
            score = METRICS[self.name].score(truth, predicted)
        except ValueError as error:
            raise MetricError(f"{self.name} failed: {error}") from error
        if not np.isfinite(score):
            raise MetricError(f"{self.name} is {score} for this submission")
        return score

    def _aligned(self, submission: pd.DataFrame, answers: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        key, *targets = answers.columns
        missing = [c for c in answers.columns if c not in submission.columns]
        extra = [c for c in submission.columns if c not in answers.columns]
        if missing:
            raise SubmissionError(f"missing column{'s' * (len(missing) > 1)} {_few(missing)}: expected "
                                  f"{_few(list(answers.columns))}, found {_few(list(submission.columns))}")  # fmt: skip
        if extra:
            raise SubmissionError(f"unexpected column{'s' * (len(extra) > 1)} {_few(extra)}")
        if len(submission) != len(answers):
            raise SubmissionError(f"{len(submission)} rows, expected {len(answers)}")
        theirs, ours = labels(submission[key]), labels(answers[key])
        if len(set(theirs)) < len(theirs):
            repeated = pd.Series(theirs)[pd.Series(theirs).duplicated()].unique().tolist()
            raise SubmissionError(f"{key} is given more than once for {_few(repeated)}")
        unknown = sorted(set(theirs) - set(ours))
        if unknown:
            raise SubmissionError(f"{key} {_few(unknown)} not in the test set; {len(unknown)} of {len(ours)} are missing")
        order = pd.Index(theirs).get_indexer(ours)
        columns = [self._column(submission[c].iloc[order], answers[c], c) for c in targets]
        truth, predicted = (np.column_stack(side) for side in zip(*columns, strict=True))
        if len(targets) == 1:
            return truth[:, 0], predicted[:, 0]
        if METRICS[self.name].values == "probability" and (predicted.sum(axis=1) <= 0).any():
            raise SubmissionError("the class probabilities of a row sum to 0")
        return truth, predicted

    def _column(self, theirs: pd.Series, ours: pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]:
        values = METRICS[self.name].values
        if values == "label":
            if theirs.isna().any():
                raise SubmissionError(f"{name} has {int(theirs.isna().sum())} empty values")
            return labels(ours), labels(theirs)
        numbers = pd.to_numeric(theirs, errors="coerce").to_numpy(np.float64)
        text = theirs[np.isnan(numbers) & theirs.notna().to_numpy()]
        if len(text):
            raise SubmissionError(f"{name} must be a number, found {text.iloc[0]!r}")
        if not np.isfinite(numbers).all():
            raise SubmissionError(f"{name} has {int((~np.isfinite(numbers)).sum())} values that are NaN or infinite")
        if values == "probability" and ((numbers < 0) | (numbers > 1)).any():
            raise SubmissionError(f"{name} must be a probability, found {numbers[(numbers < 0) | (numbers > 1)][0]:g}")
        if values == "count" and (numbers < 0).any():
            raise SubmissionError(f"{name} must not be negative, found {numbers[numbers < 0][0]:g}")
        return ours.to_numpy(np.float64), numbers


class DojoMetric:
    """The metric class of a task's `metric.py` (MLE-Dojo: a subclass of CompetitionMetrics)."""

    def __init__(self, path: Path):
        """Raises UserError where the file does not load or has no such class."""
        base = _dojo_base()
        before = set(base.subclasses)
        module = types.ModuleType(f"task_metric_{abs(hash(str(path)))}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # dataclasses and pickling inside the file look it up
        try:
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
        except Exception as error:
            raise UserError(f"{path} does not load: {type(error).__name__}: {error}") from error
        found = [c for c in base.subclasses if c not in before and c.__module__ == module.__name__]
        require(len(found) > 0, f"{path} has no subclass of CompetitionMetrics")
        try:
            self.metric = found[-1]()
        except Exception as error:
            raise UserError(f"{path}: {found[-1].__name__}() failed: {error}") from error
        self.name = found[-1].__name__

    @property
    def higher_is_better(self) -> bool:
        return bool(self.metric.higher_is_better)

    def validate(self, submission: pd.DataFrame, answers: pd.DataFrame) -> None:
        """Raises SubmissionError with the task's own words."""
        try:
            verdict = self.metric.validate_submission(submission.copy(), answers.copy())
        except Exception as error:
            raise SubmissionError(str(error) or type(error).__name__) from error
        if isinstance(verdict, tuple) and verdict and verdict[0] is False:
            raise SubmissionError(str(verdict[-1]))

    def evaluate(self, submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        """The score. Raises SubmissionError for what `validate` refuses, MetricError for a NaN or a failing metric."""
        self.validate(submission, answers)
        try:
            score = float(self.metric.evaluate(answers.copy(), submission.copy()))
        except Exception as error:
            raise MetricError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        if not np.isfinite(score):
            raise MetricError(f"{self.name} is {score} for this submission")
        return score


def _dojo_base() -> type:
    """CompetitionMetrics of MLE-Dojo, or a stand-in under its module's name, so that metric files import unchanged."""
    try:
        return importlib.import_module("mledojo.metrics.base").CompetitionMetrics
    except ImportError:
        pass

    class CompetitionMetrics:
        subclasses: list[type] = []  # noqa: RUF012  (one list for all, as MLE-Dojo keeps it)

        def __init__(self, higher_is_better: bool = True):
            self.higher_is_better = higher_is_better

        def __init_subclass__(cls, **options: object):
            super().__init_subclass__(**options)
            CompetitionMetrics.subclasses.append(cls)

    class InvalidSubmissionError(Exception):
        pass

    for name in ("mledojo", "mledojo.metrics", "mledojo.metrics.base"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["mledojo.metrics.base"].CompetitionMetrics = CompetitionMetrics
    sys.modules["mledojo.metrics.base"].InvalidSubmissionError = InvalidSubmissionError
    return CompetitionMetrics
