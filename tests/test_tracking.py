"""Records survive crashes and resumes; the ledger adds up; progress speaks without a terminal."""

import io
import json
import time

import numpy as np
import pytest

from vla_wmrl.config import TrainConfig
from vla_wmrl.errors import UserError
from vla_wmrl.progress import Progress, clock
from vla_wmrl.tracking import JsonLines, Ledger, TensorBoardSink, Tracker, read_jsonl, start_run


def test_rows_after_the_checkpoint_do_not_survive_a_resume(tmp_path):
    tracker = Tracker(tmp_path)
    for step in range(1, 6):
        tracker.log(step, {"reward/env_mean": step / 10})
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 6, "reward')  # torn by a crash
    tracker = Tracker(tmp_path, resume_step=3)
    tracker.log(4, {"reward/env_mean": 0.9})
    tracker.close()
    assert [(r["step"], r["reward/env_mean"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9),
    ]  # fmt: skip


def test_an_existing_file_is_not_appended_to_without_resume(tmp_path):
    Tracker(tmp_path).close()
    with pytest.raises(UserError, match="--resume"):
        Tracker(tmp_path)


def test_rows_are_on_disk_at_once_and_numbers_are_plain(tmp_path):
    rows = JsonLines(tmp_path / "eval.jsonl")
    rows.write({"a": np.float32(0.5), "b": float("nan"), "c": np.arange(2), "d": np.bool_(True), 3: "x"})
    assert read_jsonl(tmp_path / "eval.jsonl") == [{"a": 0.5, "b": None, "c": [0, 1], "d": True, "3": "x"}]


def test_sinks_get_numbers_only(tmp_path):
    tracker = Tracker(tmp_path, sinks=(TensorBoardSink(tmp_path),))
    tracker.log(1, {"x": 1.0, "nan": float("nan"), "list": [1, 2], "text": "t"})
    tracker.close()
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_phases_count_exclusively_and_add_up():
    ledger = Ledger()
    start = time.perf_counter()
    with ledger.phase("rollout"):
        time.sleep(0.02)
        with ledger.phase("render"):
            time.sleep(0.05)
    wall = time.perf_counter() - start
    assert ledger.seconds["rollout"] < ledger.seconds["render"]
    assert sum(ledger.seconds.values()) == pytest.approx(wall, abs=5e-3)


def test_the_ledger_counts_by_purpose_and_survives_a_resume():
    ledger = Ledger()
    ledger.add_real("anchors", 520)
    ledger.add_real("anchors", np.int64(80))
    ledger.add_real("evaluation", 100)
    ledger.add_imagined("rollouts", 64)
    other = Ledger()
    other.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    other.add_real("anchors", 1)
    assert other.metrics()["steps/real_anchors"] == 601 and ledger.metrics()["steps/real_anchors"] == 600
    assert other.metrics()["steps/real"] == 701 and other.metrics()["steps/imagined"] == 64


def test_a_run_folder_names_every_session(tmp_path):
    start_run(tmp_path / "run", TrainConfig(), {"mujoco": "3.3.2"})
    folder = start_run(tmp_path / "run", TrainConfig(), {"mujoco": "3.3.3"})
    sessions = json.loads((folder / "manifest.json").read_text())["sessions"]
    assert [s["mujoco"] for s in sessions] == ["3.3.2", "3.3.3"]


def test_a_run_folder_that_cannot_be_written_is_a_users_mistake(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to output_dir .*: name another"):
        start_run(tmp_path / "file" / "run", TrainConfig(), {})


def test_progress_without_a_terminal_prints_lines_even_while_one_unit_lasts():
    out = io.StringIO()
    with Progress(4, "rollouts", out, every_s=0.05) as bar:
        time.sleep(0.2)
        bar.update(2, note="success 0.50")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("rollouts 0/4 (0%)") and len(lines) >= 3
    assert lines[-1].startswith("rollouts 2/4 (50%)") and "ETA" in lines[-1] and lines[-1].endswith("success 0.50")


def test_work_of_an_earlier_session_does_not_shorten_the_eta():
    with Progress(100, "episodes", io.StringIO(), done=90) as bar:
        assert "90/100 (90%)" in bar.line() and "ETA" not in bar.line()
        bar._start -= 60
        bar.update(1)
        assert "ETA 9m" in bar.line()


def test_bars_nest_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with Progress(2, "outer", out) as outer:
        with Progress(3, "inner", out) as inner:
            inner.update(3)
        outer.update(2)
    assert Progress._live is None and "outer 2/2" in out.getvalue() and "inner 3/3" in out.getvalue()


def test_durations_read_well():
    assert [clock(s) for s in (0.4, 59, 61, 3599, 3660)] == ["0 s", "59 s", "1m 01s", "59m 59s", "1h 01m"]
