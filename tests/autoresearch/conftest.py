"""Small tasks in MLE-Dojo's format."""

import json

import numpy as np
import pandas as pd
import pytest


def write_task(folder, metric="rmse", answers=None, settings=None, train=None, test=None):
    """A task folder of 20 rows; every part can be given."""
    rng = np.random.default_rng(0)
    public, private = folder / "public", folder / "private"
    public.mkdir(parents=True)
    private.mkdir()
    x = rng.normal(size=60)
    kind = "regression" if metric in ("rmse", "rmsle", "mae") else "binary"
    y = np.abs(3 * x + 1) if kind == "regression" else (x > 0).astype(int)
    table = pd.DataFrame({"id": np.arange(60), "x": x, "colour": ["red", "green", "blue"] * 20, "target": y})
    train = table[:40] if train is None else train
    test = table[40:].drop(columns="target") if test is None else test
    answers = table[40:][["id", "target"]] if answers is None else answers
    train.to_csv(public / "train.csv", index=False)
    test.to_csv(public / "test.csv", index=False)
    sample = answers.copy()
    sample[sample.columns[1:]] = 0
    sample.to_csv(public / "sample_submission.csv", index=False)
    (public / "description.txt").write_text("Predict the target.")
    answers.to_csv(private / "test_answer.csv", index=False)
    for which in ("private", "public"):
        scores = pd.DataFrame({"rank": np.arange(1, 11), "score": np.linspace(0.1, 1.0, 10)})
        scores.to_csv(private / f"{which}_leaderboard.csv", index=False)
    (folder / "task.json").write_text(json.dumps({"metric": metric, **(settings or {})}))
    return folder


@pytest.fixture(scope="session")
def task_writer():
    return write_task


@pytest.fixture
def make_task(tmp_path):
    def make(name="small", **options):
        return write_task(tmp_path / name, **options)

    return make
