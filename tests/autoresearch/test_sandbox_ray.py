"""Boxes in Ray's actors do what boxes here do, are lost and replaced as they are, and never see the hidden answers."""

import os
import shutil
import signal

import pytest

from text_agents.autoresearch import config
from text_agents.autoresearch.sandbox import INSTALL, Limits
from text_agents.autoresearch.tasks import load_task
from vla_wmrl import cli
from vla_wmrl.errors import UserError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bubblewrap is not installed: {INSTALL}")


def test_a_box_on_ray_runs_hides_is_lost_and_comes_back(make_task):
    from text_agents.autoresearch.sandbox_ray import RaySandbox, packed

    task = load_task(make_task())
    assert not any("answer" in path or "leaderboard" in path for path in packed({"small": task.public})["small"])
    with RaySandbox({"small": task.public}, Limits(cpu_s=20, wall_s=120, memory_mb=256), preload=()) as sandbox:
        copy = (
            "import os, shutil\nprint(sorted(os.listdir(os.environ['DATA_DIR'])))\n"
            "shutil.copy(os.environ['DATA_DIR'] + '/sample_submission.csv', os.environ['SUBMISSION_PATH'])"
        )
        found = sandbox.run_many([("small", copy), ("small", "raise ValueError('no')")])
        assert found[0].stdout == "['description.txt', 'sample_submission.csv', 'test.csv', 'train.csv']\n", found[0].stderr
        assert task.grade(found[0].submission).status == "valid"
        assert found[1].reason == "error" and "ValueError: no" in found[1].stderr
        actor = sandbox._all[0].actor
        os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
        assert sandbox.run("small", "print(1)") is None, "a lost program is missing, not failed"
        assert sandbox.run("small", "print(2)").stdout == "2\n"
        with pytest.raises(UserError, match=r"workers=5, but Ray has 1 CPUs"):
            RaySandbox({"small": task.public}, workers=5)
    assert not ray.is_initialized(), "whoever started Ray ends it"


def test_without_ray_the_command_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    assert cli.main(["research", "run", "--file=x.py", "--task=wine", "--sandbox.pool=ray"]) == 2
    assert "make env EXTRAS=dev,ray" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_one_line(make_task, tmp_path, capsys):
    program = tmp_path / "solution.py"
    program.write_text("print(1)")
    argv = ["research", "run", f"--file={program}", f"--task_dir={make_task()}", "--sandbox.pool=ray"]
    assert cli.main([*argv, "--sandbox.ray_address=127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    assert "does not answer at sandbox.ray_address=127.0.0.1:1" in err and err.count("error:") == 1
