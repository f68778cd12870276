"""The stand-in for the sandbox: what ran keeps its own outcome, what did not gets one like it, and training runs in it."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from text_agents.autoresearch.pipeline import sample
from text_agents.autoresearch.rollouts import Verdict, prepare
from text_agents.autoresearch.tasks import load_task

PATH = Path(__file__).parents[2] / "benchmarks" / "research_surrogate.py"


@pytest.fixture(scope="module")
def surrogate():
    spec = importlib.util.spec_from_file_location("research_surrogate", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def truth(text):
    if '"encode": "none"' in text:
        return Verdict("runtime_error", 0.1, float("nan"), 1.0)
    rank = 0.8 if '"rows": "all"' in text else 0.3
    return Verdict("valid", 0.5 + 0.5 * rank, rank, 2.0)


def test_the_stand_in_keeps_what_ran_and_has_learnt_the_rest(surrogate, make_task):
    [task] = prepare([load_task(make_task())], [False])
    rng = np.random.default_rng(0)
    texts = [sample("regression", rng).to_json() for _ in range(260)]
    known = {(task.name, text): truth(text) for text in texts[:200]}
    odd = Verdict("no_submission", 0.2, float("nan"), 7.0)  # nothing in its choices says so
    known[task.name, texts[0]] = odd
    stand_in = surrogate.StandIn(known)
    found = stand_in([task] * 260, texts, [(0,)] * 260)
    assert all(v is known[task.name, t] for v, t in zip(found, texts[:200], strict=False))
    assert np.mean([v.status == truth(t).status for v, t in zip(found[200:], texts[200:], strict=True)]) > 0.9
    assert stand_in.seconds == pytest.approx(sum(v.seconds for v in found)) and stand_in.asked == 260


def test_the_spread_between_tasks_does_not_count_as_insight(surrogate, make_task, monkeypatch):
    """A world model that knows how hard a task is and nothing of its programs has no correlation within groups."""
    tasks = prepare([load_task(make_task(n)) for n in ("easy", "hard")], [False, False])
    rng = np.random.default_rng(0)

    def group(number, level):
        rollouts = []
        for _ in range(8):
            texts = tuple(sample("regression", rng).to_json() for _ in range(2))
            verdicts = tuple(Verdict("valid", level + 0.1 * rng.random(), 0.5) for _ in texts)
            reward = max(v.reward for v in verdicts)
            start = SimpleNamespace(task_id=number)
            rollouts.append(SimpleNamespace(start=start, texts=texts, verdicts=verdicts, reward=reward))
        return tuple(rollouts)

    class Level:
        def __init__(self, form):
            pass

        def fit(self, cases, statuses, rewards):
            return self

        def predict(self, cases):
            noise = rng.random(len(cases)) * 1e-3
            bucket = [3 if c.task == "easy" else 0 for c in cases]
            chances = [np.eye(7)[3 + b] * (1 - e) + np.eye(7)[0] * e for b, e in zip(bucket, noise, strict=True)]
            return [SimpleNamespace(chances=c) for c in chances]

    monkeypatch.setattr(surrogate, "OutcomeModel", Level)
    monkeypatch.setattr(surrogate.judges, "OutcomeModel", Level)
    texts = {"description": "d", "inventory": "i", "brief": "b", "code": "x = 1", "status": "valid", "reward": 0.7}
    past = pd.DataFrame([{"task": n, **texts} for n in ("easy", "hard")])
    updates = [[group(0, 0.8), group(1, 0.5)] for _ in range(6)]
    rows = list(surrogate.judgements(tasks, updates, past))
    assert [(r["updates"], r["world model"]) for r in rows][::3] == [("1 to 3", "other tasks"), ("4 to 6", "other tasks")]
    assert all(abs(r["correlation"]) < 0.4 for r in rows), rows
