"""Verdicts and trajectories: malformed, failed, invalid, valid or missing, from text to reward, in the real sandbox."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from text_agents.autoresearch.episode import SpecAgent, Trajectory, observation, prompt, run_group
from text_agents.autoresearch.execute import Executed, error_of, execute, judge
from text_agents.autoresearch.pipeline import Spec
from text_agents.autoresearch.render import facts_of
from text_agents.autoresearch.sandbox import INSTALL, Limits, Result, Sandbox
from text_agents.autoresearch.tasks import load_task

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bubblewrap is not installed: {INSTALL}")
LIMITS = Limits(cpu_s=30, wall_s=300, memory_mb=1024, disk_mb=16)
OK = Result("ok", 0, "", "", None, "", 1.0, 0.5, 50.0)


@pytest.fixture(scope="module")
def task(tmp_path_factory, task_writer):
    return load_task(task_writer(tmp_path_factory.mktemp("execute") / "small"))


@pytest.fixture(scope="module")
def box(task):
    with Sandbox({task.name: task.public}, LIMITS) as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("result", "status", "reward", "words"),
    [
        (None, "ungraded", float("nan"), "not available"),
        (replace(OK, reason="busy"), "ungraded", float("nan"), "not available"),
        (replace(OK, reason="idle_time"), "runtime_error", 0.1, "still waiting"),
        (replace(OK, reason="cpu_time"), "runtime_error", 0.1, "computing time"),
        (replace(OK, reason="memory"), "runtime_error", 0.1, "1024 MB"),
        (replace(OK, reason="error", exit_code=1, stderr="ValueError: x"), "runtime_error", 0.1, "ValueError: x"),
        (OK, "no_submission", 0.2, "not written"),
        (replace(OK, note="submission.csv is a link"), "no_submission", 0.2, "is a link"),
        (replace(OK, submission=b"id,target\n1,2\n"), "no_submission", 0.2, "1 rows, expected 20"),
    ],
)
def test_each_end_has_its_status_and_what_nobody_graded_is_missing(task, result, status, reward, words):
    verdict = judge(task, "code", result, LIMITS)
    assert verdict.status == status and words in verdict.feedback
    assert verdict.reward == pytest.approx(reward, nan_ok=True)


def test_the_error_and_its_line_are_read_from_the_traceback():
    trace = (
        'Traceback (most recent call last):\n  File "solution.py", line 9, in <module>\n    f()\n'
        '  File "solution.py", line 4, in f\n    g()\n  File "/usr/lib/x.py", line 70, in g\n    raise X\n'
        "pandas.errors.ParserError: bad: worse\n"
    )
    assert error_of(trace) == ("ParserError", 4)
    assert error_of("") == (None, None) and error_of("KeyError\n") == ("KeyError", None)


@needs_bwrap
def test_specifications_run_from_text_to_reward(task, box):
    texts = [
        "I do not know.",
        '{"model": "forest", "params": {"max_depth": 3}}',
        Spec("regression", model="ridge", encode="none", output="raw").to_json(),
        Spec("regression", model="ridge", encode="onehot", output="raw").to_json(),
        Spec("regression", model="dummy", output="raw").to_json(),
    ]
    done = execute(task, facts_of(task), texts, "pipeline", box)
    assert [d.status for d in done] == ["malformed", "malformed", "runtime_error", "valid", "valid"], done
    assert [d.reward for d in done[:3]] == [0.0, 0.0, 0.1] and "max_depth=3" in done[1].feedback
    assert (done[2].error_type, done[2].sandbox_s > 0) == ("ValueError", True) and "could not convert" in done[2].feedback
    assert 0.5 <= done[4].reward <= done[3].reward <= 1.0
    assert done[3].reward == pytest.approx(0.5 + 0.5 * done[3].rank)


@needs_bwrap
def test_programs_are_gated_by_the_compiler_before_the_sandbox(task, box, monkeypatch):
    monkeypatch.setattr(box, "run", lambda *a: pytest.fail("code that does not compile was run"))
    done = execute(task, facts_of(task), ["```python\nx = (\n```", "", "print('"], "code", box)
    assert [(d.status, d.reward) for d in done] == [("malformed", 0.0)] * 3
    assert (done[0].error_type, done[0].error_line) == ("SyntaxError", 1)


@needs_bwrap
def test_a_trajectory_keeps_its_best_turn_and_does_not_depend_on_the_group(task, box):
    group = run_group(task, SpecAgent("search", seed=3), 2, box, turns=2)
    again = run_group(task, SpecAgent("search", seed=3), 1, box, turns=2)
    assert [t.texts for t in again] == [group[0].texts] and group[0].texts != group[1].texts
    for trajectory in group:
        assert len(trajectory.turns) == 2 and trajectory.reward == max(t.reward for t in trajectory.turns)
        assert trajectory.percentile == max([100 * t.rank for t in trajectory.turns if t.status == "valid"] or [0.0])


def test_percentiles_count_failures_as_zero_and_leave_out_what_nobody_graded():
    ungraded = Executed("ungraded", float("nan"), "", "")
    failed = Executed("runtime_error", 0.1, "", "")
    assert np.isnan(Trajectory("t", 0, ["a"], [ungraded]).percentile)
    assert Trajectory("t", 0, ["a", "b"], [ungraded, failed]).percentile == 0.0
    assert Trajectory("t", 0, ["a", "b"], [ungraded, failed]).reward == 0.1


def test_prompts_name_the_grammar_and_observations_stay_short(task):
    text = prompt(task, facts_of(task), "pipeline", LIMITS)
    assert "extra_trees" in text and "Predict the target." in text and "poisson" in text and "30 s" in text
    assert "fenced block" in prompt(task, facts_of(task), "code", LIMITS)
    assert len(observation(Executed("runtime_error", 0.1, "x" * 9000, ""))) == 3000
