"""The two judges: what is remembered still costs, what nobody ran is asked again, what a world model says is a draw."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from text_agents.autoresearch import judges
from text_agents.autoresearch.execute import Executed
from text_agents.autoresearch.outcomes import prediction_of
from text_agents.autoresearch.pipeline import Spec
from text_agents.autoresearch.rollouts import Verdict, prepare
from text_agents.autoresearch.sandbox import Limits
from text_agents.autoresearch.tasks import load_task
from vla_wmrl.errors import UserError
from vla_wmrl.types import Start
from vla_wmrl.world_model.language import Case

KEYS = [(0, i) for i in range(400)]


@pytest.fixture
def task(make_task):
    return prepare([load_task(make_task())], [False])[0]


def texts(*models):
    return [Spec("regression", model=m, output="raw").to_json() for m in models]


@pytest.fixture
def ran(monkeypatch):
    """Stands in for the sandbox: remembers the programs that were run, and what each is to come to."""
    seen = SimpleNamespace(texts=[], status="valid")

    def execute(task, facts, programs, mode, sandbox):
        seen.texts += programs
        valid = seen.status == "valid"
        reward = {"valid": 0.75, "ungraded": float("nan")}.get(seen.status, 0.1)
        rank = 0.5 if valid else float("nan")
        return [Executed(seen.status, reward, "", "", rank=rank, sandbox_s=9.0, cpu_s=2.0) for _ in programs]

    monkeypatch.setattr(judges, "execute", execute)
    return seen


def sandbox(**limits):
    return SimpleNamespace(limits=Limits(**limits))


def test_a_remembered_outcome_costs_what_it_cost_when_it_ran(task, ran, tmp_path):
    judge = judges.SandboxJudge(sandbox(), tmp_path / "memory.jsonl")
    first = judge([task] * 3, texts("ridge", "ridge", "knn"), KEYS)
    assert [v.reward for v in first] == [0.75] * 3 and len(ran.texts) == 2, "equal programs run once"
    assert (judge.seconds, judge.asked, judge.ran) == (6.0, 3, 2)
    again = judges.SandboxJudge(sandbox(), tmp_path / "memory.jsonl")
    assert again([task], texts("ridge"), KEYS) == first[:1]
    assert (again.seconds, again.asked, again.ran, len(ran.texts)) == (2.0, 1, 0, 2)


def test_failures_are_remembered_with_their_missing_rank(task, ran, tmp_path):
    ran.status = "runtime_error"
    judges.SandboxJudge(sandbox(), tmp_path / "memory.jsonl")([task], texts("ridge"), KEYS)
    [verdict] = judges.SandboxJudge(sandbox(), tmp_path / "memory.jsonl")([task], texts("ridge"), KEYS)
    assert (verdict.status, verdict.reward, len(ran.texts)) == ("runtime_error", 0.1, 1) and np.isnan(verdict.rank)


def test_what_nobody_graded_is_missing_and_tried_again(task, ran):
    ran.status = "ungraded"
    judge = judges.SandboxJudge(sandbox())
    assert np.isnan(judge([task], texts("ridge"), KEYS)[0].reward)
    ran.status = "valid"
    assert judge([task], texts("ridge"), KEYS)[0].reward == 0.75 and len(ran.texts) == 2


def test_other_limits_or_other_data_are_another_outcome(task, ran, tmp_path):
    for limits in ({}, {"cpu_s": 5}):
        judges.SandboxJudge(sandbox(**limits), tmp_path / "memory.jsonl")([task], texts("ridge"), KEYS)
    assert len(ran.texts) == 2
    (task.task.public / "train.csv").write_text("id,x,colour,target\n1,2,red,3\n")
    judges.SandboxJudge(sandbox(), tmp_path / "memory.jsonl")([task], texts("ridge"), KEYS)
    assert len(ran.texts) == 3


class Oracle:
    def __init__(self, *predictions):
        self.predictions, self.cases = predictions, []

    def predict(self, cases):
        self.cases += cases
        return [self.predictions[len(self.cases) - len(cases) + i] for i in range(len(cases))]


def test_the_agent_reads_one_outcome_drawn_from_the_prediction_and_is_paid_its_expectation(task):
    prediction = prediction_of(np.array([0.0, 0.3, 0.0, 0.7]), np.array([0.0, 0.0, 0.0, 1.0]))
    judge = judges.WorldJudge(Oracle(prediction), "brief")
    verdicts = judge([task] * 400, texts("ridge") * 400, KEYS)
    assert len(judge.predictor.cases) == 1, "one question a program"
    assert np.mean([v.status == "valid" for v in verdicts]) == pytest.approx(0.7, abs=0.08)
    assert {v.status for v in verdicts} == {"valid", "runtime_error"}
    assert {v.reward for v in verdicts} == {prediction.reward}
    assert all((v.rank == 0.75) == (v.status == "valid") for v in verdicts)
    again = judge([task] * 400, texts("ridge") * 400, KEYS)
    assert [v.status for v in again] == [v.status for v in verdicts], "the draw is keyed"


def test_a_missing_prediction_is_a_missing_reward(task):
    judge = judges.WorldJudge(Oracle(None), "brief")
    [verdict] = judge([task], texts("ridge"), KEYS[:1])
    assert verdict.status == "ungraded" and np.isnan(verdict.reward) and judge.missing == 1


def rollout(number, *programs):
    """An executed trajectory of (text, status, reward)."""
    said = tuple(text for text, _, _ in programs)
    verdicts = tuple(Verdict(status, reward, float("nan")) for _, status, reward in programs)
    return SimpleNamespace(start=Start(number, 0), texts=said, verdicts=verdicts)


class Learner:
    """A predictor that is sure of what it was told, and of failure otherwise."""

    def __init__(self):
        self.told = []

    def learn(self, rows):
        self.told += rows

    def predict(self, cases):
        valid = [any(row["code"] == case.code and row["status"] == "valid" for row in self.told) for case in cases]
        return [prediction_of(np.eye(4)[3 if v else 1], np.full(4, 0.25)) for v in valid]


def test_what_the_world_model_has_said_is_forgotten_when_it_learns(task):
    ridge, knn, lasso = texts("ridge", "knn", "lasso")
    judge = judges.WorldJudge(Learner(), "brief")
    assert judge([task], [ridge], KEYS[:1])[0].status == "runtime_error"
    executed = rollout(
        0, (ridge, "valid", 0.8), (knn, "ungraded", float("nan")), (ridge, "valid", 0.8), (lasso, "no_submission", 0.2)
    )
    judge.learn([task], [executed, executed])
    told = [(row["task"], row["status"], row["reward"]) for row in judge.predictor.told]
    assert told == [(task.name, "valid", 0.8), (task.name, "no_submission", 0.2)], (
        "ungraded is no outcome, and equal programs are one"
    )
    assert judge([task], [ridge], KEYS[:1])[0].status == "valid"
    judge.learn([task], [executed])
    assert len(judge.predictor.told) == 2, "the second time teaches nothing"


def test_a_resumed_judge_knows_what_it_had_learnt(task):
    judge, again = judges.WorldJudge(Learner(), "brief"), judges.WorldJudge(Learner(), "brief")
    judge.learn([task], [rollout(0, (texts("ridge")[0], "valid", 0.8))])
    again.load_state_dict(judge.state_dict(), [task])
    assert again.predictor.told == judge.predictor.told and again.state_dict() == judge.state_dict()


def test_the_past_of_a_task_is_left_out_only_where_folds_say_so_and_its_own_run_never(monkeypatch):
    fitted = []

    class Spy:
        def __init__(self, form):
            pass

        def fit(self, cases, statuses, rewards):
            fitted.append(([c.code for c in cases], statuses, rewards))
            return self

        def predict(self, cases):
            return [None] * len(cases)

    monkeypatch.setattr(judges, "OutcomeModel", Spy)
    texts_of = {"description": "d", "inventory": "i", "brief": "b", "report": ""}
    past = [{"task": n, **texts_of, "code": f"past = {n!r}", "status": "valid", "reward": 0.7} for n in ("a", "b")]
    now = {"task": "a", **texts_of, "code": "now = 1", "status": "runtime_error", "reward": 0.1}
    for folds, seen in ((1, ["past = 'a'", "past = 'b'"]), (2, ["past = 'b'"])):
        fitted.clear()
        world = judges.PastOutcomes(pd.DataFrame(past), ["a", "b"], folds)
        asked = [Case("a", "d", "i", "b", "x = 1")]
        world.predict(asked), world.predict(asked)
        world.learn([now])
        world.predict(asked)
        assert [codes for codes, _, _ in fitted] == [seen, [*seen, "now = 1"]]
        assert fitted[-1][1][-1] == "runtime_error" and fitted[-1][2][-1] == 0.1


def test_a_task_is_never_predicted_by_a_model_that_has_seen_it(monkeypatch):
    fitted = []

    class Spy:
        def __init__(self, form):
            pass

        def fit(self, cases, statuses, rewards):
            fitted.append({c.task for c in cases})
            self.tasks = fitted[-1]
            return self

        def predict(self, cases):
            assert not self.tasks & {c.task for c in cases}
            return [None] * len(cases)

    monkeypatch.setattr(judges, "OutcomeModel", Spy)
    names = [f"t{i}" for i in range(8)]
    texts_of = {"description": "d", "inventory": "i", "brief": "b", "code": "x = 1", "status": "valid", "reward": 0.7}
    rows = pd.DataFrame([{"task": n, **texts_of} for n in names])
    world = judges.PastOutcomes(rows, names, folds=4)
    cases = [Case(n, "d", "i", "b", "x = 1") for n in (*names, "new")]
    assert world.predict(cases) == [None] * 9
    assert len(fitted) == 5 and fitted[-1] == set(names), "a task that has no past is new to the model of all rows"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\n", b"[1, 2]\n", b'{"a": 1}\n', b"no json\n", None])
def test_a_memory_that_is_none_is_one_line(content, tmp_path):
    path = tmp_path / "memory.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match="is a folder" if content is None else "no file of sandbox outcomes"):
        judges.SandboxJudge(sandbox(), path)
