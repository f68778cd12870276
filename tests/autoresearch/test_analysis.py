"""The analysis of a task's data is what a program printed in the sandbox, and it reaches the world model's prompt."""

import shutil

import numpy as np
import pandas as pd
import pytest

from text_agents.autoresearch.analysis import reports
from text_agents.autoresearch.judges import WorldJudge
from text_agents.autoresearch.rollouts import prepare
from text_agents.autoresearch.sandbox import INSTALL, Sandbox
from text_agents.autoresearch.tasks import load_task
from vla_wmrl.world_model.language import build_prompt

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bubblewrap is not installed: {INSTALL}")


def test_a_report_tells_what_programs_stumble_over_and_reaches_the_prompt(make_task):
    n = np.arange(30)
    train = pd.DataFrame({"id": n, "x": n - 5.0, "colour": ["red", "blue"] * 15, "one": 1, "target": 2.0 * n})
    test = pd.DataFrame({"id": n + 30, "x": 1.0 * n, "colour": ["red", "green"] * 15, "one": 1})
    test.loc[3, "x"] = np.nan
    answers = pd.DataFrame({"id": n + 30, "target": 1.0})
    folder, bare = make_task(train=train, test=test, answers=answers), make_task("bare")
    (bare / "public" / "train.csv").unlink()
    [task, _] = prepare([load_task(folder), load_task(make_task("other"))], [False, False])
    with Sandbox({"small": folder / "public", "bare": bare / "public"}, preload=("pandas",)) as sandbox:
        found = reports(["small", "bare"], sandbox)
    assert list(found) == ["small"], "nothing is told of data that the program could not read"
    for line in (
        "train 30 rows, test 30 rows; 3 numeric and 1 string columns in both",
        "only in train: target",
        "missing values in test: x 1",
        "categories that only test has: colour 1",
        "constant columns: one",
        "numeric columns with negative values: x",
        "rank correlation with target: id +1.00, x +1.00",
    ):
        assert line in found["small"].splitlines(), found["small"]
    case = WorldJudge(None, "brief", found).case(task, '{"model": "ridge"}')
    assert case.report == found["small"] and "only in train: target" in build_prompt(case)
