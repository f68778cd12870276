"""The ablation's table: ungraded trajectories are missing, arms are compared with real execution on the same seeds."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "research_ablation.py"
KEYS = {"arm", "seed", "task", "held_out", "percentile", "n", "sandbox_s", "wall_s"}


@pytest.fixture(scope="module")
def ablation():
    spec = importlib.util.spec_from_file_location("research_ablation", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cell(runs, arm, seed, percentiles, sandbox_s):
    folder = runs / f"{arm}_{seed}"
    folder.mkdir(parents=True)
    ledger = {"worker_time/sandbox_anchors_s": sandbox_s, "worker_time/sandbox_evaluation_s": 99.0, "time/total_s": 30.0,
              "time/update_s": 1.0, "time/execute_s": 4.0, "time/evaluation_s": 25.0}  # fmt: skip
    (folder / "ledger.json").write_text(json.dumps(ledger))
    rows = [
        {"task": task, "held_out": task != "c", "percentile": p} for task in "abc" for p in (percentiles, None, percentiles)
    ]
    (folder / "eval_after.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_rows_and_table_of_the_cells_that_are_there(ablation, tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    cell(runs, "real", 0, 60.0, 200.0)
    cell(runs, "real", 1, 64.0, 220.0)
    cell(runs, "wmrl", 0, 63.0, 50.0)
    (runs / "wmrl_1").mkdir()  # interrupted
    (runs / "before_0.jsonl").write_text(json.dumps({"task": "a", "held_out": True, "percentile": 40.0}) + "\n")
    ablation.write(runs, out)
    rows = json.loads((out / "summary.json").read_text())
    assert all(set(r) == KEYS for r in rows) and len(rows) == 1 + 3 * 3
    wmrl = [r for r in rows if r["arm"] == "wmrl"]
    assert {(r["percentile"], r["n"], r["sandbox_s"], r["wall_s"]) for r in wmrl} == {(63.0, 2, 50.0, 5.0)}
    lines = (out / "table.md").read_text().splitlines()
    assert lines[2].startswith("| before | 1 | 40.0 |") and lines[3].startswith("| real | 2 | 62.0 |")
    assert lines[4].startswith("| wmrl | 1 | 63.0 | +3.0 | [+3.0, +3.0] | 50 | 25% |"), "compared with another seed's real run"
    assert lines[5] == "" and lines[8:] == [  # after two lines of head
        "| real less before | +20.0 | [+20.0, +20.0] | 1 |",
        "| wmrl less before | +23.0 | [+23.0, +23.0] | 1 |",
    ], "differences of arms that share no seed and task"
    assert (out / "curves.png").stat().st_size > 10_000


def test_nobody_graded_is_no_percentile_and_no_crash(ablation):
    rows = ablation.rows_of("wm", 0, [{"task": "a", "held_out": True, "percentile": None}], 0.0, 1.0)
    assert rows[0]["percentile"] is None and rows[0]["n"] == 0
    assert "wm" not in ablation.table(rows)
