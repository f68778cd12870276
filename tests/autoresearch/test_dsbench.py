"""DSBench's own layout: found, graded by its own scorer, and wrong submissions told before the scorer can misread them."""

import numpy as np
import pandas as pd
import pytest

from text_agents.autoresearch.dsbench import ScriptMetric
from text_agents.autoresearch.tasks import load_task
from vla_wmrl.errors import UserError

SCORER = """
import argparse, os
import pandas as pd
parser = argparse.ArgumentParser()
for name in ("path", "name", "answer_file", "predict_file"):
    parser.add_argument("--" + name)
parser.add_argument("--value", default="count")
args = parser.parse_args()
error = abs(pd.read_csv(args.answer_file)[args.value] - pd.read_csv(args.predict_file)[args.value])
with open(os.path.join(args.path, args.name, "result.txt"), "w") as f:
    f.write(str(error.mean()))
"""


@pytest.fixture
def layout(tmp_path):
    root = tmp_path / "data_modeling"
    inputs, answers = root / "data/data_resplit/bikes", root / "data/answers/bikes"
    for folder in (inputs, answers, root / "data/task", root / "evaluation"):
        folder.mkdir(parents=True)
    table = pd.DataFrame({"when": np.arange(60), "x": np.arange(60) % 7, "count": np.arange(60) * 2.0})
    table[:30].to_csv(inputs / "train.csv", index=False)
    table[30:].drop(columns="count").to_csv(inputs / "test.csv", index=False)
    table[30:][["when", "count"]].assign(count=0).to_csv(inputs / "sampleSubmission.csv", index=False)
    table[30:].to_csv(answers / "test_answer.csv", index=False)
    (root / "data/task/bikes.txt").write_text("Predict the count.")
    (root / "evaluation/bikes_eval.py").write_text(SCORER)
    for kind, score in (("baseline", 10.0), ("GT", 2.0)):
        folder = root / "save_performance" / kind / "bikes"
        folder.mkdir(parents=True)
        (folder / "result.txt").write_text(str(score))
    return inputs


def submission(task, shift, shuffled=False):
    table = task.answers.assign(count=task.answers["count"] + shift)
    return (table.sample(frac=1, random_state=0) if shuffled else table).to_csv(index=False).encode()


def test_a_task_is_read_in_place_and_ranked_between_its_two_scores(layout):
    task = load_task(layout)
    assert (task.name, task.kind, task.target, task.id_column) == ("bikes", "regression", ["count"], "when")
    assert task.metric.higher_is_better is False and task.boards == {} and task.description == "Predict the count."
    grade = task.grade(submission(task, 4.0))
    assert (grade.status, grade.score, grade.gap, grade.rank) == ("valid", 4.0, 0.75, 0.75)
    assert task.grade(submission(task, 20.0)).rank == 0.0 and task.grade(submission(task, 0.0)).rank == 1.0
    assert not (layout / "test_answer.csv").exists(), "the answers must lie outside what the sandbox mounts"


def test_rows_in_another_order_are_not_scored_by_position(layout):
    task = load_task(layout)
    assert task.grade(submission(task, 4.0, shuffled=True)).score == 4.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.rename(columns={"count": "Count"}), "missing column count"),
        (lambda t: t[:-1], "29 rows, expected 30"),
        (lambda t: t.assign(when=t["when"] + 1), "not those of the test set"),
        (lambda t: t.assign(count=np.nan), "30 empty values"),
    ],
)
def test_wrong_submissions_never_reach_the_scorer(layout, change, words):
    task = load_task(layout)
    grade = task.grade(change(task.answers).to_csv(index=False).encode())
    assert grade.status == "no_submission" and words in grade.message


def test_a_scorer_that_fails_is_nobodys_grade(layout):
    script = layout.parents[2] / "evaluation/bikes_eval.py"
    script.write_text("raise ValueError('no such luck')")
    grade = load_task(layout).grade(submission(load_task(layout), 1.0))
    assert grade.status == "ungraded" and "no such luck" in grade.message
    script.write_text(SCORER.replace("str(error.mean())", "'nan'"))
    assert load_task(layout).grade(submission(load_task(layout), 1.0)).status == "ungraded"
    assert ScriptMetric(script, False).name == "bikes_eval"


def test_a_board_of_ones_own_and_a_metric_of_ours_are_taken(layout):
    boards = layout.parents[2] / "leaderboards"
    boards.mkdir()
    (boards / "bikes.csv").write_text("score\n1.0\n3.0\n5.0\n7.0\n")
    task = load_task(layout, "mae")
    grade = task.grade(submission(task, 4.0))
    assert (task.metric.name, grade.rank, grade.gap) == ("mae", 0.5, 0.75)


def test_all_missing_parts_are_listed(layout):
    root = layout.parents[2]
    (root / "data/task/bikes.txt").unlink()
    (root / "evaluation/bikes_eval.py").unlink()
    (root / "save_performance/GT/bikes/result.txt").unlink()
    with pytest.raises(UserError, match=r"task/bikes.txt.*bikes_eval.py.*--metric.*result.txt"):
        load_task(layout)
    with pytest.raises(UserError, match="no task folder"):
        load_task(layout.parent / "cars")


def test_answers_without_an_id_are_in_the_order_of_the_sample(layout):
    path = layout.parents[1] / "answers/bikes/test_answer.csv"
    pd.read_csv(path)[["count"]].to_csv(path, index=False)
    task = load_task(layout)
    assert task.id_column == "when" and task.grade(submission(task, 4.0)).score == 4.0
