"""Task folders with missing parts, and submissions that a grader has to refuse with a reason."""

import io
import shutil

import numpy as np
import pandas as pd
import pytest

from text_agents.autoresearch.metrics import MetricError, SubmissionError, TableMetric
from text_agents.autoresearch.tasks import load_task
from vla_wmrl.errors import UserError


def csv(**columns):
    return pd.DataFrame(columns).to_csv(index=False).encode()


def answers_of(task):
    return {name: task.answers[name].tolist() for name in task.answers.columns}


def test_all_missing_parts_are_listed_at_once(make_task):
    folder = make_task()
    for part in ("public/description.txt", "private/test_answer.csv", "task.json"):
        (folder / part).unlink()
    for board in folder.rglob("*_leaderboard.csv"):
        board.unlink()
    with pytest.raises(UserError) as error:
        load_task(folder)
    for word in ("description.txt", "test_answer.csv", "leaderboard.csv", "metric"):
        assert word in str(error.value)
    assert "sample_submission" not in str(error.value)


def test_a_folder_that_is_not_there_or_a_metric_that_is_unknown(make_task, tmp_path):
    with pytest.raises(UserError, match="no task folder"):
        load_task(tmp_path / "nowhere")
    with pytest.raises(UserError, match="did you mean rmsle"):
        load_task(make_task(settings={"metric": "rmsl"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"id": c["id"]}, "missing column target"),
        (lambda c: {**c, "more": c["id"]}, "unexpected column more"),
        (lambda c: {k: v[:-1] for k, v in c.items()}, "19 rows, expected 20"),
        (lambda c: {**c, "id": [c["id"][0]] * 20}, "more than once"),
        (lambda c: {**c, "id": [i + 1000 for i in c["id"]]}, "not in the test set"),
        (lambda c: {**c, "target": ["a lot", *c["target"][1:]]}, "must be a number, found 'a lot'"),
        (lambda c: {**c, "target": [np.nan, *c["target"][1:]]}, "NaN or infinite"),
        (lambda c: {**c, "target": [np.inf, *c["target"][1:]]}, "NaN or infinite"),
        (lambda c: {**c, "target": [-5.0, *c["target"][1:]]}, "must not be negative, found -5"),
    ],
)
def test_a_wrong_submission_is_refused_in_a_graders_words(make_task, change, message):
    task = load_task(make_task(metric="rmsle"))
    grade = task.grade(csv(**change(answers_of(task))))
    assert grade.status == "no_submission" and message in grade.message and np.isnan(grade.rank)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "not written"),
        (b"", "empty"),
        (b"id,target\n", "no rows"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"\x1f\x8b\x08rest", "gzip archive"),
        (b"\x80\x04\x95rest", "pickle"),
        (b"id,target\n1,\0\n", "binary"),
        (b"id,target\n\xff\xfe\n", "UTF-8"),
        (b"," * 5000 + b"\n1\n", "columns"),
        (b"id,target\n" + b"1,2\n" * 5000, "more than 1000 rows"),
        (b'id,target\n1,"2\n', "cannot be read"),
    ],
)
def test_archives_and_broken_files_are_no_submission(make_task, data, message):
    grade = load_task(make_task()).grade(data)
    assert grade.status == "no_submission" and message in grade.message


def test_the_order_of_rows_and_columns_does_not_change_the_score(make_task):
    task = load_task(make_task())
    table = task.answers.copy()
    table["target"] += 0.35
    shuffled = table.sample(frac=1, random_state=1)[["target", "id"]]
    scores = [task.grade(t.to_csv(index=False).encode()).score for t in (table, shuffled)]
    assert scores == pytest.approx([0.35, 0.35])
    assert task.grade(table.to_csv(index=False).encode()).rank == pytest.approx(0.7)


def test_ids_written_as_floats_are_the_same_ids(make_task):
    task = load_task(make_task())
    table = task.answers.astype(float)
    assert task.grade(table.to_csv(index=False).encode()).status == "valid"


def test_a_metric_that_is_nan_grades_nobody(make_task):
    one_class = pd.DataFrame({"id": np.arange(20), "target": 1})
    task = load_task(make_task(metric="auc", answers=one_class))
    grade = task.grade(csv(id=list(range(20)), target=[0.5] * 20))
    assert grade.status == "ungraded" and "auc" in grade.message


@pytest.mark.parametrize(
    ("metric", "truth", "predicted", "score"),
    [
        ("auc", [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8], 0.75),
        ("log_loss", [0, 1], [0.25, 0.75], -np.log(0.75)),
        ("accuracy", ["a", "b", "b", "c"], ["a", "b", "c", "c"], 0.75),
        ("f1", [1, 1, 0, 0], [1, 0, 1, 0], 0.5),
        ("rmse", [1.0, 3.0], [2.0, 5.0], np.sqrt(2.5)),
        ("rmsle", [0.0, np.e - 1], [0.0, 0.0], np.sqrt(0.5)),
        ("mae", [1.0, 3.0], [2.0, 5.0], 1.5),
    ],
)
def test_metrics_against_values_worked_out_by_hand(metric, truth, predicted, score):
    n = range(len(truth))
    tables = [pd.DataFrame({"id": n, "target": v}) for v in (predicted, truth)]
    assert TableMetric(metric).evaluate(*tables) == pytest.approx(score)


def test_class_probabilities_are_rescaled_and_labels_for_them_refused():
    truth = pd.DataFrame({"id": [1, 2], "a": [1, 0], "b": [0, 1]})
    double = pd.DataFrame({"id": [1, 2], "b": [0.2, 0.8], "a": [0.2, 0.2]})
    metric = TableMetric("log_loss")
    assert metric.evaluate(double, truth) == pytest.approx(-(np.log(0.5) + np.log(0.8)) / 2)
    with pytest.raises(SubmissionError, match="missing columns a, b"):
        metric.validate(pd.DataFrame({"id": [1, 2], "target": ["a", "b"]}), truth)
    with pytest.raises(SubmissionError, match=r"probability, found 1\.5"):
        metric.validate(pd.DataFrame({"id": [1, 2], "a": [1.5, 0], "b": [0, 1]}), truth)
    with pytest.raises(SubmissionError, match="sum to 0"):
        metric.validate(pd.DataFrame({"id": [1, 2], "a": [0, 0], "b": [0, 1]}), truth)


DOJO = """
from mledojo.metrics.base import CompetitionMetrics, InvalidSubmissionError

class Ours(CompetitionMetrics):
    def __init__(self, higher_is_better: bool = False):
        super().__init__(higher_is_better)

    def evaluate(self, y_true, y_pred):
        y_pred.drop(columns="id", inplace=True)  # metrics of the wild change what they are given
        return %s

    def validate_submission(self, submission, ground_truth):
        if len(submission) != len(ground_truth):
            raise InvalidSubmissionError("Number of rows does not match")
        return "Submission is valid."
"""


def dojo_task(make_task, value):
    folder = make_task("dojo")
    (folder / "task.json").unlink()
    (folder / "utils").mkdir()
    (folder / "utils" / "metric.py").write_text(DOJO % value)
    return folder


def test_a_task_of_mle_dojo_works_with_its_own_metric(make_task):
    task = load_task(dojo_task(make_task, "abs(y_true.target - y_pred.target).mean()"))
    right, short = task.answers.to_csv(index=False).encode(), task.answers[:-1].to_csv(index=False).encode()
    assert (task.metric.name, task.metric.higher_is_better) == ("Ours", False)
    assert (task.grade(right).score, task.grade(right).rank) == (0.0, 1.0)
    assert task.grade(right).score == 0.0, "a metric that changes its tables must not change the answers"
    assert "Number of rows does not match" in task.grade(short).message


@pytest.mark.parametrize("value", ["float('nan')", "1 / 0"])
def test_a_metric_of_the_task_that_fails_is_missing_not_zero(make_task, value):
    task = load_task(dojo_task(make_task, value))
    grade = task.grade(task.answers.to_csv(index=False).encode())
    assert grade.status == "ungraded" and np.isnan(grade.rank)
    with pytest.raises(MetricError):
        task.metric.evaluate(task.answers, task.answers)


def test_mle_dojos_own_folders_are_found(make_task, tmp_path):
    folder = dojo_task(make_task, "0.5")
    (tmp_path / "whole" / "data").mkdir(parents=True)
    for part in ("public", "private"):
        shutil.move(folder / part, tmp_path / "whole" / "data" / part)
    shutil.move(folder / "utils", tmp_path / "whole" / "utils")
    (tmp_path / "whole" / "info").mkdir()
    for which in ("private", "public"):
        name = f"{which}_leaderboard.csv"
        shutil.move(tmp_path / "whole" / "data" / "private" / name, tmp_path / "whole" / "info" / name)
    for where in (tmp_path / "whole", tmp_path / "whole" / "data"):
        if where.name == "data":  # boards back where MLE-Dojo's environment has them
            shutil.copytree(tmp_path / "whole" / "info", where / "private", dirs_exist_ok=True)
        assert load_task(where).metric.name == "Ours"


def test_a_metric_file_without_a_metric_is_a_mistake_of_the_folder(make_task):
    folder = dojo_task(make_task, "0.5")
    (folder / "utils" / "metric.py").write_text("x = 1")
    with pytest.raises(UserError, match="no subclass"):
        load_task(folder)
    (folder / "utils" / "metric.py").write_text("import nothing_of_that_name")
    with pytest.raises(UserError, match="does not load"):
        load_task(folder)


def test_the_gap_is_there_only_with_a_baseline_and_a_best(make_task):
    task = load_task(make_task(settings={"baseline": 1.0, "best": 0.2}))
    assert task.placed(0.6).gap == pytest.approx(0.5)
    assert np.isnan(load_task(make_task("other")).placed(0.6).gap)


def test_the_inventory_shows_columns_and_stays_in_bounds(make_task):
    task = load_task(make_task())
    text = task.inventory()
    assert "train.csv" in text and "colour: 3 values" in text and "test_answer" not in text
    assert len(task.inventory(limit=100)) <= 100


def test_answers_are_read_as_given(make_task):
    task = load_task(make_task())
    assert (task.id_column, task.target, len(task.answers), task.kind) == ("id", ["target"], 20, "regression")
    assert pd.read_csv(io.BytesIO(csv(**answers_of(task)))).equals(task.answers.reset_index(drop=True))
