"""DSBench's own layout (its data.zip and save_performance.zip, unpacked in data_modeling/), read in place.

    data/data_resplit/NAME/   train.csv, test.csv, a sample submission: what the agent's code sees; pass this as --task_dir
    data/answers/NAME/test_answer.csv, data/task/NAME.txt
    evaluation/NAME_eval.py   its scorer, run as it is in a process of its own (whoever prepared the folder is trusted)
    save_performance/{baseline,GT}/NAME/result.txt   the two scores of the relative performance gap

There is no leaderboard in it: with none, a task's rank is its relative performance gap, cut at 1. With a board of yours,
leaderboards/NAME.csv beside evaluation/, it is HumanRank, as WMRL reports.

Non-obvious behaviour: DSBench's scorers compare rows by position and look at no id. Here ids are checked first, as a
grader does, and rows are put in the answers' order."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from text_agents.autoresearch.metrics import Metric, MetricError, SubmissionError, TableMetric, labels
from text_agents.autoresearch.tasks import Kind, Task, read_board, read_csv
from vla_wmrl.errors import UserError, require

SCORE_S = 300.0  # for a scorer
FEW_VALUES = 20  # a target with more is a number to predict


def is_task(folder: Path) -> bool:
    """Whether `folder` is DSBench's data_resplit/NAME."""
    return folder.resolve().parent.name == "data_resplit"


@dataclass(frozen=True)
class ScriptMetric:
    """A scorer of DSBench: a program that writes a number to result.txt."""

    path: Path
    higher_is_better: bool

    @property
    def name(self) -> str:
        return self.path.stem

    def validate(self, submission: pd.DataFrame, answers: pd.DataFrame) -> None:
        """Raises SubmissionError where ids, rows or columns are not the answers'."""
        key = answers.columns[0]
        missing = [c for c in answers.columns if c not in submission.columns]
        if missing:
            raise SubmissionError(f"missing column {missing[0]}: expected {', '.join(map(str, answers.columns))}")
        if len(submission) != len(answers):
            raise SubmissionError(f"{len(submission)} rows, expected {len(answers)}")
        theirs, ours = labels(submission[key]), labels(answers[key])
        if sorted(theirs) != sorted(ours):
            raise SubmissionError(f"{key} are not those of the test set")
        empty = submission[list(answers.columns[1:])].isna().to_numpy().sum()
        if empty:
            raise SubmissionError(f"{int(empty)} empty values")

    def evaluate(self, submission: pd.DataFrame, answers: pd.DataFrame) -> float:
        """The score. Raises SubmissionError for what `validate` refuses, MetricError where the scorer fails or says NaN."""
        self.validate(submission, answers)
        key = answers.columns[0]
        order = pd.Index(labels(submission[key])).get_indexer(labels(answers[key]))
        with tempfile.TemporaryDirectory() as folder:
            files = {"answer_file": answers, "predict_file": submission.iloc[order]}
            command = [sys.executable, str(self.path), "--path", folder, "--name", "."]
            for name, table in files.items():
                table.to_csv(Path(folder) / f"{name}.csv", index=False)
                command += [f"--{name}", str(Path(folder) / f"{name}.csv")]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SCORE_S, check=False)
                score = float((Path(folder) / "result.txt").read_text(encoding="utf-8"))
            except subprocess.TimeoutExpired as error:
                raise MetricError(f"{self.path.name} took more than {SCORE_S:g} s") from error
            except (OSError, ValueError) as error:
                words = done.stderr.strip().splitlines()[-1:] or ["no result.txt"]
                raise MetricError(f"{self.path.name} failed: {words[0]}") from error
        if not np.isfinite(score):
            raise MetricError(f"{self.path.name} is {score} for this submission")
        return score


def load(folder: str | Path, metric: str | None = None) -> Task:
    """The task of data_resplit/NAME; `metric`: one of ours in its scorer's place. Raises UserError listing what is missing."""
    public = Path(folder).resolve()
    name, data = public.name, public.parent.parent
    roots = (data.parent, data)  # data_modeling/ where all lies under data/, or where everything is side by side
    texts = {"task": data / "task" / f"{name}.txt", "answers": data / "answers" / name / "test_answer.csv"}
    missing = [
        str(p.relative_to(data)) for p in (*texts.values(), public / "train.csv", public / "test.csv") if not p.is_file()
    ]
    samples = [p for p in sorted(public.glob("*.csv")) if p.name not in ("train.csv", "test.csv")]
    missing += [] if samples else [f"data_resplit/{name}/sample_submission.csv"]
    script = _first(roots, f"evaluation/{name}_eval.py")
    scores = [_first(roots, f"save_performance/{kind}/{name}/result.txt") for kind in ("baseline", "GT")]
    board = _first(roots, f"leaderboards/{name}.csv")
    missing += [] if metric or script else [f"evaluation/{name}_eval.py (or --metric)"]
    missing += [] if all(scores) else [f"save_performance/baseline and GT/{name}/result.txt (unpack save_performance.zip)"]
    require(not missing, f"{public} is no task of DSBench: missing {', '.join(missing)}")
    baseline, best = (_number(p) for p in scores)
    require(baseline != best, f"{name}: baseline and best score are both {best:g}, so that nothing can be ranked")
    answers = _answers(read_csv(texts["answers"]), read_csv(samples[0]), texts["answers"])
    chosen: Metric = TableMetric(metric) if metric else ScriptMetric(script, best > baseline)
    return Task(
        name=name, public=public, private=texts["answers"].parent,
        description=texts["task"].read_text(encoding="utf-8", errors="replace"), metric=chosen,
        kind=_kind(answers, chosen.higher_is_better), boards={} if board is None else {"private": read_board(board)},
        answers=answers, baseline=baseline, best=best,
    )  # fmt: skip


def _first(roots: tuple[Path, ...], name: str) -> Path | None:
    return next((root / name for root in roots if (root / name).is_file()), None)


def _number(path: Path) -> float:
    try:
        return float(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no score") from error


def _answers(table: pd.DataFrame, sample: pd.DataFrame, path: Path) -> pd.DataFrame:
    """id and targets, named as in the sample submission; answers without an id are in its order."""
    key, *targets = sample.columns
    missing = [c for c in targets if c not in table.columns]
    require(bool(targets) and not missing, f"{path} lacks the columns {', '.join(missing or ['of a target'])}")
    if key not in table.columns:
        require(len(table) == len(sample), f"{path} has {len(table)} rows and no {key}, the sample submission {len(sample)}")
        table = table.assign(**{key: sample[key].to_numpy()})
    return table[[key, *targets]]


def _kind(answers: pd.DataFrame, higher_is_better: bool) -> Kind:
    """By the answers, since a scorer has no tag: few values are classes, numbers with an error to minimise are not."""
    values = answers.iloc[:, 1]
    if pd.api.types.is_numeric_dtype(values) and values.nunique() > FEW_VALUES and not higher_is_better:
        return "regression"
    return "binary" if answers.shape[1] == 2 and values.nunique() <= 2 else "multiclass"
