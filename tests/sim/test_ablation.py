"""The main job's ablation: arms are compared on the same states and seeds, and a run's steps are not the world model's."""

import gzip
import json
import shutil

import pytest

from benchmarks import ablation
from benchmarks.cells import curve
from vla_wmrl.tracking import write_json


def cell(runs, arm, seed, wins, steps):
    folder = runs / f"{arm}_{seed}"
    folder.mkdir(parents=True)
    rows = [{"task_id": t, "init_id": i, "seed": seed, "success": (t, i) in wins} for t in (0, 7) for i in range(4)]
    (folder / "eval_after.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (runs / f"before_{seed}.jsonl").write_text("".join(json.dumps(r | {"success": r["init_id"] == 0}) + "\n" for r in rows))
    (folder / "metrics.jsonl").write_text('{"step": 8, "dream/success": 0.5}\n')
    write_json(folder / "ledger.json", {"time/total_s": 9.0, "time/execute_s": 5.0, "time/evaluation_s": 4.0} | steps)


@pytest.fixture
def runs(tmp_path):
    steps = {"steps/real_anchors": 100, "steps/real_starts": 20}
    cell(tmp_path, "wmrl", 0, {(0, 0), (0, 1), (0, 2), (7, 0)}, steps | {"steps/real_world_model": 5000})
    cell(tmp_path, "real_branch", 0, {(0, 0), (7, 1)}, steps)
    cell(tmp_path, "real_branch", 1, {(0, 3)}, steps)
    return tmp_path


def test_arms_are_compared_on_the_seeds_that_both_have_and_task_by_task(runs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    ablation.write(runs, out)
    text = (out / "table.md").read_text()
    assert (out / "arms.png").stat().st_size > 10_000
    assert "| real_branch less before | 2 | -6.2 [" in text  # 3 of 16 less 4 of 16
    assert "| wmrl less real_branch | 1 | +25.0 [" in text  # 4 of 8 less 2 of 8: seed 1 has no wmrl
    assert "] | +50.0 [" in text and text.rstrip().endswith(
        "| +0.0 [-75.0, +75.0] |"
    )  # task 0: 3 less 1 of 4, task 7: 1 less 1
    assert "| wmrl | 1 | " in text and "| +25.0 | 120 | 5000 | 0 | 5 |" in text


def test_debiasing_and_weighting_are_compared_over_the_arms_with_and_without(tmp_path):
    """Four arms are two switches: each tells about either, and a pair of arms alone uses half of the runs."""
    for arm, wins in (("mix", 2), ("debias", 1), ("denoise", 4), ("wmrl", 2)):
        cell(tmp_path, arm, 0, {(t, i) for t in (0, 7) for i in range(wins)}, {})
    cell(tmp_path, "mix", 1, set(), {})  # the others have no such seed
    ablation.write(tmp_path, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| debias, wmrl less mix, denoise | 1 | -37.5 [" in text  # 1.5 less 3 of 4
    assert "| denoise, wmrl less mix, debias | 1 | +37.5 [" in text


def test_the_steps_of_a_run_leave_out_what_the_world_model_was_fitted_on_once(runs):
    rows, _ = ablation.rows_of("wmrl", 0, runs / "wmrl_0", runs)
    assert {(r["real_steps_train"], r["real_steps_once"]) for r in rows} == {(120, 5000)}


def test_cells_whose_run_folders_are_gone_stay_in_the_table(runs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    ablation.write(runs, out)
    before = (out / "table.md").read_text()
    shutil.rmtree(runs / "wmrl_0")
    shutil.rmtree(runs / "real_branch_1")
    ablation.write(runs, out)
    assert (out / "table.md").read_text() == before
    for name in ("episodes", "metrics"):
        rows = [json.loads(line) for line in gzip.decompress((out / f"{name}.jsonl.gz").read_bytes()).splitlines()]
        assert {(r["arm"], r["seed"]) for r in rows} == {("wmrl", 0), ("real_branch", 0), ("real_branch", 1)}
    cell(runs, "wmrl", 0, set(), {})  # run again: takes the old cell's place
    ablation.write(runs, out)
    assert "| wmrl less before | 1 | -25.0 [" in (out / "table.md").read_text()


def test_a_variant_is_an_arm_of_its_own_and_is_compared_with_its_arm(runs, tmp_path):
    cell(runs, "wmrl-long", 0, {(0, 0)}, {})
    out = tmp_path / "out"
    out.mkdir()
    ablation.write(runs, out)
    text = (out / "table.md").read_text()
    assert "| wmrl-long less wmrl | 1 | -37.5 [" in text and "| wmrl-long less real_branch | 1 | -12.5 [" in text
    assert ablation.arms_of(json.loads((out / "summary.json").read_text())) == ["real_branch", "wmrl", "wmrl-long"]


def test_the_curve_of_an_arm_is_not_that_of_arms_whose_names_begin_with_its():
    rows = [{"arm": arm, "seed": 0, "x": value} for arm, value in (("real", 1.0), ("real_branch", 0.0), ("real-long", 3.0))]
    assert curve(rows, "real", "x").tolist() == [1.0]
