"""A task: a folder in MLE-Dojo's format, read whole and checked before anything runs.

    public/   what the agent's code sees: train.csv, test.csv, ..., description.txt, sample_submission.csv
    private/  test_answer.csv (id first, then the target columns), private_leaderboard.csv, public_leaderboard.csv
    task.json optional: {"metric", "kind", "baseline", "best"};  utils/metric.py optional: MLE-Dojo's metric class

Where MLE-Dojo keeps things elsewhere they are found as well: the two folders under `data/`, boards under `info/`, and
`utils/metric.py` beside `data/`. `task.json` names one of our metrics and wins over `metric.py`. DSBench's own layout
is read by `dsbench`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from text_agents.autoresearch import scoring
from text_agents.autoresearch.metrics import METRICS, DojoMetric, Metric, MetricError, SubmissionError, TableMetric
from text_agents.autoresearch.submission import read_submission
from vla_wmrl.errors import UserError, require

Kind = Literal["binary", "multiclass", "regression", "other"]
BOARDS = ("private", "public")


@dataclass(frozen=True)
class Grade:
    """What a grader says of a submission. `rank` is HumanRank; numbers are NaN and `medal` None unless valid."""

    status: scoring.Status  # "valid", "no_submission" or "ungraded" (the metric itself failed)
    message: str
    score: float = float("nan")
    rank: float = float("nan")
    medal: str | None = None
    gap: float = float("nan")  # relative performance gap, where the task has a baseline and a best


@dataclass(frozen=True)
class Task:
    """One task. boards: {"private" and/or "public": [N] scores}, or {}; target: the columns to predict."""

    name: str
    public: Path
    private: Path
    description: str
    metric: Metric
    kind: Kind
    boards: dict[str, np.ndarray] = field(repr=False)
    answers: pd.DataFrame = field(repr=False)
    baseline: float | None = None
    best: float | None = None

    @property
    def id_column(self) -> str:
        return str(self.answers.columns[0])

    @property
    def target(self) -> list[str]:
        return [str(c) for c in self.answers.columns[1:]]

    def grade(self, data: bytes | None) -> Grade:
        """Grade a submission file's bytes (None: the program left none)."""
        if data is None:
            return Grade("no_submission", "submission.csv was not written")
        try:
            table = read_submission(data, max_rows=max(1000, 10 * len(self.answers)))
            self.metric.validate(table, self.answers)
            score = self.metric.evaluate(table, self.answers)
        except SubmissionError as error:
            return Grade("no_submission", f"Invalid submission: {error}")
        except MetricError as error:
            return Grade("ungraded", f"The submission could not be graded: {error}")
        return self.placed(score)

    def placed(self, score: float) -> Grade:
        """The grade of a score: HumanRank over the boards, medal on the private board, relative performance gap, which is
        the rank as well where there are no boards."""
        higher, gap = self.metric.higher_is_better, float("nan")
        if self.baseline is not None and self.best is not None and self.baseline != self.best:
            gap = scoring.performance_gap(score, self.baseline, self.best)
        if not self.boards:  # DSBench has its two scores only
            rank = min(1.0, gap)
            message = f"{self.metric.name} {score:.6g}: {rank:.3f} of the way from the baseline to the best"
            return Grade("valid", message, score, rank, None, gap)
        rank = scoring.human_rank(score, self.boards, higher)
        board = self.boards.get("private", next(iter(self.boards.values())))
        place = scoring.position(score, board, higher)
        message = f"{self.metric.name} {score:.6g}: place {place} of {len(board)}, HumanRank {rank:.3f}"
        return Grade("valid", message, score, rank, scoring.medal(score, board, higher), gap)

    def inventory(self, rows: int = 3, limit: int = 4000) -> str:
        """The public files as an agent or a world model is told of them: columns, types, missing values, first rows."""
        lines = []
        for path in sorted(p for p in self.public.rglob("*") if p.is_file()):
            lines.append(f"{path.relative_to(self.public)} ({path.stat().st_size} bytes)")
            if path.suffix == ".csv":
                table = pd.read_csv(path, low_memory=False)
                lines[-1] += f": {len(table)} rows, {table.shape[1]} columns"
                for name, column in table.items():
                    empty = int(column.isna().sum())
                    numbers = pd.api.types.is_numeric_dtype(column)  # strings are `object` or `str`, by pandas' version
                    kinds = str(column.dtype) if numbers else f"{column.nunique()} values"
                    first = ", ".join(map(str, column.head(rows)))
                    lines.append(f"  {name}: {kinds}{f', {empty} missing' if empty else ''}: {first}"[:120])
        text = "\n".join(lines)
        return text if len(text) <= limit else text[: limit - 16] + "\n... (cut here)"


def load_task(folder: str | Path, metric: str | None = None) -> Task:
    """The task in `folder`; `metric`: one of ours where it names none. Raises UserError listing what is missing."""
    root = Path(folder)
    require(root.is_dir(), f"no task folder {root}")
    from text_agents.autoresearch import dsbench  # it makes Tasks

    if dsbench.is_task(root):
        return dsbench.load(root, metric)
    data = root / "data" if (root / "data" / "public").is_dir() else root
    public, private = data / "public", data / "private"
    needed = [public / "description.txt", public / "sample_submission.csv", private / "test_answer.csv"]
    missing = [str(p.relative_to(root)) for p in needed if not p.is_file()]
    boards = {name: path for name in BOARDS if (path := _first(_board_paths(root, data, name)))}
    if not boards:
        missing.append("private/private_leaderboard.csv (or public_leaderboard.csv)")
    settings = _settings(root / "task.json")
    source = _first([root / "utils" / "metric.py", root / "metric.py", data.parent / "utils" / "metric.py"])
    name = settings.get("metric", metric)
    if name is None and source is None:
        missing.append(f"utils/metric.py (or task.json with a metric: {', '.join(METRICS)})")
    require(not missing, f"{root} is no task: missing {', '.join(missing)}")
    scores = {board: read_board(path) for board, path in boards.items()}
    answers = _answers(private / "test_answer.csv")
    chosen = TableMetric(name) if name is not None else DojoMetric(source)
    return Task(
        name=settings.get("name", root.resolve().name),
        public=public.resolve(),
        private=private.resolve(),
        description=(public / "description.txt").read_text(encoding="utf-8", errors="replace"),
        metric=chosen,
        kind=settings.get("kind", _kind(chosen.name, answers)),
        boards=scores,
        answers=answers,
        baseline=settings.get("baseline"),
        best=settings.get("best"),
    )


def _board_paths(root: Path, data: Path, name: str) -> list[Path]:
    file = f"{name}_leaderboard.csv"
    return [data / "private" / file, data / "public" / file, root / "info" / file, root / file]


def _first(paths: list[Path]) -> Path | None:
    return next((p for p in paths if p.is_file()), None)


def _settings(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    require(isinstance(settings, dict), f"{path} must hold keys and values")
    for name in ("baseline", "best"):
        value = settings.get(name)
        require(value is None or isinstance(value, int | float), f"{path}: {name}={value!r} must be a number")
    return settings


def read_csv(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path, compression=None)
    except (ValueError, UnicodeDecodeError) as error:  # pandas' own errors are ValueErrors
        raise UserError(f"{path} is no table: {error}") from error


def read_board(path: Path) -> np.ndarray:
    """Scores [N] of a leaderboard: the column `score`, else the second one (as MLE-Dojo reads it)."""
    table = read_csv(path)
    named = [c for c in table.columns if str(c).lower() == "score"]
    require(len(named) > 0 or table.shape[1] >= 2, f"{path} has no column score")
    scores = pd.to_numeric(table[named[0]] if named else table.iloc[:, 1], errors="coerce").dropna().to_numpy(np.float64)
    require(len(scores) > 0, f"{path} has no scores")
    return scores


def _answers(path: Path) -> pd.DataFrame:
    table = read_csv(path)
    require(table.shape[1] >= 2 and len(table) > 0, f"{path} needs an id column, a target column and rows")
    require(not table.iloc[:, 0].duplicated().any(), f"{path} has an id twice in column {table.columns[0]}")
    return table


def _kind(metric: str, answers: pd.DataFrame) -> Kind:
    """By the metric's tag, as WMRL sorts DSBench's tasks; labels of two values are binary."""
    if metric == "auc":
        return "binary"
    if metric in ("rmse", "rmsle", "mae"):
        return "regression"
    if metric in METRICS:
        return "multiclass" if answers.shape[1] > 2 or answers.iloc[:, 1].nunique() > 2 else "binary"
    return "other"
