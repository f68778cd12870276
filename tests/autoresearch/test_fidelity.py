"""The fidelity harness: figures against hand-made cases, nothing judged on a task it was fitted on."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from text_agents.autoresearch import fidelity
from text_agents.autoresearch.outcomes import prediction_of
from vla_wmrl.errors import UserError
from vla_wmrl.world_model.language import STATUSES, certain, compile_gate


def rows(n_tasks=10, per_task=12):
    """Programs whose words tell their outcome: boosting is valid and good, a bad import fails."""
    found = []
    for t in range(n_tasks):
        for i in range(per_task):
            kind = i % 4
            code = [
                "x = (",
                "import missing_thing\nfit(x)",
                "boosting = 1\nsubmit(boosting)",
                "linear = 1\nsubmit(linear)",
            ][kind]
            status = ["malformed", "runtime_error", "valid", "valid"][kind]
            reward = [0.0, 0.1, 0.95, 0.6][kind]
            texts = {"description": "d", "inventory": "i", "brief": "b"}
            found.append({"task": f"t{t}", "code": code + f"\n# {i}", "status": status, "reward": reward, **texts})
    return pd.DataFrame(found)


def test_a_perfect_predictor_has_perfect_figures_and_missing_ones_are_left_out():
    table = rows(4, 4)
    exact = []
    for row in table.itertuples():
        p_status = np.eye(4)[STATUSES.index(row.status)]
        p_bucket = np.eye(4)[3 if row.reward > 0.9 else 1]
        exact.append(prediction_of(p_status, p_bucket))
    figures = fidelity.figures(table, [None, *exact[1:]])
    assert (figures["n"], figures["missing"], figures["status_at_1"], figures["status_at_2"]) == (16, 1, 1, 1)
    assert figures["before_mae"] < 0.05 and figures["before_spearman"] > 0.95


def test_no_prediction_at_all_is_no_figure():
    assert fidelity.figures(rows(1, 4), [None] * 4) == {"n": 4.0, "missing": 4.0}


def test_words_beat_the_majority_and_every_fit_is_on_other_tasks():
    table = rows()
    cases = fidelity.cases_of(table)
    seen = []

    def spy(fitting, fitted_rows):
        seen.append((set(fitted_rows["task"]), predict := fidelity.fit_text(fitting, fitted_rows)))
        return lambda others: (judged.append({c.task for c in others}), predict(others))[1]

    judged = []
    text = fidelity.figures(table, fidelity.across_tasks(spy, table, cases))
    assert all(not fitted & other for (fitted, _), other in zip(seen, judged, strict=True)) and len(seen) == 10
    majority = fidelity.figures(table, fidelity.across_tasks(fidelity.fit_majority, table, cases))
    assert text["status_at_1"] == 1.0 and text["before_mae"] < majority["before_mae"]
    assert text["before_spearman_within_task"] > 0.9 and text["after_mae"] < 0.1
    assert majority["status_at_1"] == pytest.approx(0.75), "the gate knows the quarter that does not compile"


def test_a_constant_has_no_rank_correlation_within_tasks():
    table = rows(4, 4)
    same = [prediction_of(np.full(4, 0.25), np.full(4, 0.25))] * len(table)
    assert fidelity.figures(table, same)["before_spearman_within_task"] == 0.0


def test_complexity_ranks_by_size_alone_and_broken_code_is_zero():
    assert fidelity.complexity("x = (") == 0.0
    assert fidelity.complexity("import a, b\nx = 1") > fidelity.complexity("x = 1") > 0
    table = rows()
    predict = fidelity.fit_complexity(fidelity.cases_of(table), table)
    short, long = (fidelity.Case("t", "", "", "", code) for code in ("x = 1", "import a\n" * 30))
    assert predict([short])[0].reward < predict([long])[0].reward


def test_a_certain_prediction_has_its_reward_exactly():
    assert certain(compile_gate("(")).reward == 0.0


def test_files_that_are_no_data_are_one_clear_line(tmp_path):
    path = tmp_path / "f.jsonl"
    with pytest.raises(UserError, match="no file"):
        fidelity.read_rows(path)
    path.write_text('{"task": "a", "inventory": "i"}\n')
    with pytest.raises(UserError, match="no solutions"):
        fidelity.read_rows(path)
    path.write_text("{\n")
    with pytest.raises(UserError, match="line 1, is not JSON"):
        fidelity.read_rows(path)
    path.write_text(json.dumps({"task": "a", "code": "x"}) + "\n")
    with pytest.raises(UserError, match="lacks status"):
        fidelity.read_rows(path)


def test_ungraded_solutions_have_no_truth_to_be_judged_by(tmp_path):
    path = tmp_path / "f.jsonl"
    texts = {"task": "a", "description": "d", "inventory": "i", "brief": "b"}
    lines = [texts, {"task": "a", "code": "x = 1", "status": "valid", "reward": 0.7}]
    lines.append({"task": "a", "code": "y = 1", "status": "ungraded", "reward": float("nan")})
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    table = fidelity.read_rows(path)
    assert table["code"].tolist() == ["x = 1"] and table["inventory"].tolist() == ["i"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("junk.gz", b"x", "no file of executions"),
        ("cut.gz", gzip.compress(b"x" * 1000)[:-9], "no file of executions"),
        ("junk.jsonl", b"\xff\xfe", "no file of executions"),
        ("torn.jsonl", b'{"a": 1', "line 1, is not JSON"),
        ("list.jsonl", b"[1, 2]", "line 1, names no task"),
    ],
)
def test_data_that_is_none_is_one_line(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        fidelity.read_rows(tmp_path / name)
