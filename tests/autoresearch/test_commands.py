"""`vla-wmrl research`: help without heavy imports, mistakes as one line, results that are never overwritten."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from text_agents.autoresearch import commands
from text_agents.autoresearch.sandbox import INSTALL
from vla_wmrl import cli

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bubblewrap is not installed: {INSTALL}")
HEAVY = ("torch", "numpy", "pandas", "sklearn", "scipy", "sim")


def test_help_of_every_command_imports_nothing_heavy():
    code = (
        "import sys; from vla_wmrl.cli import main\n"
        f"for c in {list(commands.COMMANDS)!r}: assert main(['research', c, '--help']) == 0\n"
        f"assert main(['research']) == 0; print('HEAVY', *[m for m in {HEAVY!r} if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0 and done.stdout.endswith("HEAVY\n"), done.stdout[-300:] + done.stderr
    for name in commands.COMMANDS:
        assert f"usage: vla-wmrl research {name}" in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["evall"], "did you mean eval"),
        (["run"], "--file"),
        (["run", "--file=x.py"], "name one task"),
        (["run", "--file=x.py", "--task=wine", "--task_dir=y"], "name one task"),
        (["run", "--file=nothing.py", "--task=wine"], "no file nothing.py"),
        (["run", "--file=x.py", "--task=wine", "--sandbox.memory=1"], "did you mean sandbox.memory_mb"),
        (["tasks", "--task_dir=nowhere"], "no task folder nowhere"),
        (["tasks", "--bike_sharing=nowhere"], "--output_dir"),
        (["eval", "--output_dir=x", "--tasks=wines"], "did you mean wine"),
        (["eval", "--output_dir=x", "--agent=clever"], "clever"),
        (["eval"], "--output_dir"),
        (["eval", "--output_dir=x", "--agent=policy"], "--policy=FOLDER"),
        (["eval", "--output_dir=x", "--agent=policy", "--policy=y", "--tasks=wine"], "y holds no policy"),
        (["eval", "--output_dir=x", "--url=http://localhost"], "--agent=chat"),
        (["fidelity", "--data=x", "--predictor=boost"], "did you mean boosting"),
        (["fidelity"], "--data"),
        (["fidelity", "--data=nowhere"], "no file nowhere"),
        (["eval", "--output_dir=x", "--agent=chat", "--url=localhost:8000", "--tasks=wine"], "neither http:// nor https://"),
        (["tasks", f"--output_dir={__file__}"], "is a file"),
        (["report"], "--output_dir"),
    ],
)
def test_mistakes_are_one_line_on_stderr(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["research", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not list(tmp_path.iterdir())


def test_the_list_of_tasks_names_splits_and_a_folder_is_described(make_task, capsys):
    assert cli.main(["research", "tasks"]) == 0
    out = capsys.readouterr().out
    assert "breast-cancer" in out and "held out" in out
    assert cli.main(["research", "tasks", f"--task_dir={make_task()}"]) == 0
    assert "rmse (lower is better), 20 test rows" in capsys.readouterr().out


@needs_bwrap
def test_a_solution_is_run_and_graded(make_task, tmp_path, capsys):
    folder = make_task()
    program = tmp_path / "solution.py"
    program.write_text("import os, shutil\nshutil.copy(os.environ['DATA_DIR'] + '/sample_submission.csv', 'submission.csv')\n")
    assert cli.main(["research", "run", f"--file={program}", f"--task_dir={folder}"]) == 0
    out = capsys.readouterr().out
    assert "status   valid" in out and "HumanRank" in out


@needs_bwrap
def test_an_evaluation_resumes_and_is_never_overwritten(make_task, tmp_path, capsys):
    first, second = make_task("first"), make_task("second")
    argv = ["research", "eval", "--tasks=", "--episodes=2", "--turns=1", f"--output_dir={tmp_path / 'out'}"]
    assert cli.main([*argv, f"--task_dirs={first}"]) == 0
    rows = (tmp_path / "out" / "trajectories.jsonl").read_text()
    assert cli.main([*argv, f"--task_dirs={first}"]) == 2 and "--resume" in capsys.readouterr().err
    assert cli.main([*argv, f"--task_dirs={first},{second}", "--resume"]) == 0
    assert (tmp_path / "out" / "trajectories.jsonl").read_text().startswith(rows)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    keys = {"arm", "seed", "task", "held_out", "percentile", "n", "sandbox_s", "wall_s"}
    assert [set(r) for r in summary] == [keys] * 2 and [(r["task"], r["n"]) for r in summary] == [
        ("first", 2),
        ("second", 2),
    ]


def test_ungraded_trajectories_are_missing_from_the_mean():
    common = {"arm": "a", "seed": 0, "task": "t", "held_out": True, "sandbox_s": 1.0, "wall_s": 1.0}
    rows = [{**common, "percentile": 40.0}, {**common, "percentile": float("nan")}]
    row = commands.summarise(rows)[0]
    assert (row["percentile"], row["n"], row["sandbox_s"]) == (40.0, 1, 2.0)
    assert "40.0" in commands.leaderboard([row])


def test_the_page_of_an_evaluation_and_its_leaderboard(tmp_path, capsys):
    common = {
        "arm": "search",
        "seed": 3,
        "held_out": True,
        "sandbox_s": 1.0,
        "wall_s": 1.0,
        "statuses": ["valid", "runtime_error"],
    }
    rows = [
        {**common, "task": "a<b", "percentile": 40.0, "ranks": [0.4, None], "texts": ["the <best> one", "another"]},
        {**common, "task": "a<b", "percentile": None, "ranks": [None, None], "texts": ["x", "y"]},
        {**common, "task": "c", "percentile": 0.0, "ranks": [None, None], "texts": ["x", "y"]},
    ]
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert cli.main(["research", "report", f"--output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "40.0    1" in out and "20.0    2" in out, "an ungraded trajectory is missing from the mean, not 0"
    page = (tmp_path / "report.html").read_text()
    assert "a&lt;b: percentile 40.0" in page and "the &lt;best&gt; one" in page and "c: no valid program" in page
    assert "<td>40.0 (1)</td>" in page and page.count("not recorded") >= 3 and "http" not in page.split("</head>")[1]


def test_a_folder_of_another_command_is_told_where_its_report_is(make_task, tmp_path, capsys):
    for name, row in (("ours", {"percentile": 1.0, "task": "t"}), ("sims", {"task_id": 1, "success": True})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval_after.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "empty").mkdir()
    for command, name, words in (
        (["report"], "ours", "vla-wmrl research report"),
        (["research", "report"], "sims", "no run of `vla-wmrl research train`"),
        (["research", "report"], "empty", "no run of `vla-wmrl research train`"),
        (["research", "report"], "nowhere", "no run folder"),
    ):
        assert cli.main([*command, f"--output_dir={tmp_path / name}"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and words in err
