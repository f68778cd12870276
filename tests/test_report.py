"""The report: complete from a full run folder, honest from a partial one, and never asking the network."""

import re

import numpy as np
import pytest

from vla_wmrl import arguments, report, report_plots
from vla_wmrl.config import TrainConfig
from vla_wmrl.tracking import JsonLines, Ledger, Tracker, start_run, write_json

TASKS = (0, 3, 7)


def make_run(folder, episodes=50, updates=60, videos=True):
    """A synthetic run folder as `train` leaves it."""
    rng = np.random.default_rng(0)
    argv = ["--policy.path=checkpoints/nano", "--world_model.path=w", f"--env.task_ids={','.join(map(str, TASKS))}"]
    cfg = arguments.load(TrainConfig, [*argv, "--steps=60"])
    protocol = {"suite": "libero_10", "max_steps": 520, "settle_steps": 10, "control_hz": 20}
    start_run(folder, cfg, {"packages": {"mujoco": "3.3.2"}, "renderer": "llvmpipe", "protocol": protocol})
    for phase, rate in (("before", 0.35), ("after", 0.62)):
        rows = JsonLines(folder / f"eval_{phase}.jsonl")
        for task_id in TASKS:
            for init_id in range(episodes):
                done = bool(rng.random() < rate + 0.05 * (task_id - 3))
                row = {"task_id": task_id, "init_id": init_id, "success": done, "steps": 250 if done else 520}
                rows.write({**row, "truncated": not done, "task": "put both <moka pots> on the stove"})
    ledger, tracker = Ledger(), Tracker(folder)
    ledger.add_real("evaluation", 150 * 380)
    for step in range(1, updates + 1):
        ledger.add_real("anchors", 900)
        ledger.add_imagined("rollouts", 7200)
        for phase, s in (("rollout", 4.0), ("render", 2.5), ("world_model", 0.7), ("update", 1.4)):
            ledger.seconds[phase] = ledger.seconds.get(phase, 0) + s
        true = 0.35 + 0.27 * (1 - np.exp(-step / 25))
        tracker.log(step, {
            "wm/success_twins": true + 0.12 * rng.random(), "success/wm": true,
            "success/env": float(rng.binomial(16, true)) / 16,
            "reward/wm_mean": true + 0.1, "reward/calibrated_mean": true, "reward/env_mean": true - 0.02,
            "wm/reward_twins": true + 0.09, "calib/spearman": 0.7, "calib/residual": float("nan") if step < 9 else 0.2,
            "fusion/s2": 0.5 + 0.1 * rng.random(), "fusion/w_anchor": 1.6, "fusion/w_wm": 0.9,
            "calib/pairs": step * 16, "loss/policy": 0.01 * rng.normal(), "loss/clip_frac": 0.1 * rng.random(),
            "adv/frac_zero_std": 0.3, **ledger.metrics(),
        })  # fmt: skip
    write_json(folder / "ledger.json", {**ledger.metrics(), "steps/real_evaluation": 2 * 150 * 380})
    (folder / "eval_00030.jsonl").write_text((folder / "eval_before.jsonl").read_text())
    x = rng.random(400)
    y = (rng.random(400) < 0.1 + 0.7 * x**2).astype(float)
    grid = np.linspace(0, 1, 30)
    write_json(folder / "calibration.json", {"x": grid, "y": 0.1 + 0.7 * grid**2, "pairs": np.c_[x, y]})
    if videos:
        make_video(folder / "videos" / "after_task0_init3_success.mp4")
    return folder


def make_video(path):
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=20)
        stream.width = stream.height = 128
        stream.pix_fmt = "yuv420p"
        for t in range(40):
            frame = np.full((128, 128, 3), 230, np.uint8)
            frame[40:80, 2 * t : 2 * t + 40] = (37, 99, 235)
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)


def test_a_full_run_has_every_part_and_asks_nothing_of_the_network(tmp_path):
    html = report.write(make_run(tmp_path / "run")).read_text()
    assert "not recorded" not in html
    for part in (
        "points",
        "Paired over 150",
        "anchor pairs",
        "real control steps: anchors",
        "114,000",
        "evaluations",
        "<video",
        "3.3.2",
        "520",
    ):
        assert part in html
    assert "put both &lt;moka pots&gt;" in html
    for source in re.findall(r'(?:src|href)="([^"]{0,12})', html):
        assert source.startswith("data:")
    assert "http" not in re.sub(r"data:[^\"]*", "", html)


def test_rates_are_the_counts_with_wilson_intervals(tmp_path):
    rate = report.Rate(23, 25, 25)
    assert str(rate) == "92.0% [75%, 98%] (23/25)"


def test_no_rate_before_the_planned_episodes_exist(tmp_path):
    run = report.Run.read(make_run(tmp_path / "run", episodes=12, updates=2, videos=False))
    html = report.success_section(run)
    assert "12 of 50 episodes run" in html and "%" not in re.sub(r"<img[^>]*>|<p>.*?</p>", "", html)
    assert "success before" not in report.tiles(run)


@pytest.mark.parametrize("gone", ["config.yaml", "manifest.json", "metrics.jsonl", "eval_before.jsonl",
                                  "eval_after.jsonl", "calibration.json", "everything"])  # fmt: skip
def test_a_missing_part_is_said_not_crashed_on(tmp_path, gone):
    folder = make_run(tmp_path / "run", episodes=2, updates=1, videos=False)
    for path in folder.glob("*" if gone == "everything" else gone):
        path.unlink()
    assert "not recorded" in report.write(folder).read_text()


def test_a_metrics_file_torn_by_a_crash_still_reports(tmp_path):
    folder = make_run(tmp_path / "run", episodes=2, updates=3, videos=False)
    with (folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 4, "loss')
    assert "policy updates" in report.write(folder).read_text()


@pytest.mark.parametrize(("shift", "drawn"), [(0.0, True), (-0.7, False)])
def test_margins_have_no_line_without_bias(shift, drawn):
    pairs = np.array([[0.2 + shift, 0.0], [0.9 + shift, 1.0]])
    assert ("no bias" in report_plots.calibration(pairs[:, 0], pairs[:, 1], pairs)) is drawn
