"""The world model from past outcomes: what it reads off a program, and that it learns what decides."""

import numpy as np
import pytest

from text_agents.autoresearch import outcomes
from text_agents.autoresearch.generate import MISTAKES
from text_agents.autoresearch.pipeline import Spec
from text_agents.autoresearch.render import Facts, render
from vla_wmrl.errors import UserError
from vla_wmrl.world_model.language import Case

FACTS = Facts("regression", "id", "target", ("target",), False)
INVENTORY = """sample_submission.csv (9 bytes): 20 rows, 2 columns
  id: int64: 1, 2
  target: float64: 0.0, 0.0
test.csv (99 bytes): 20 rows, 3 columns
  id: int64: 1, 2
  x: float64{gaps}: 1.0, 2.0
  colour: {colour}: red, blue
train.csv (199 bytes): 40 rows, 4 columns
  id: int64: 3, 4
  x: float64: 1.0, 2.0
  colour: {colour}: red, blue
  target: float64: 1.0, 2.0
"""
DESCRIPTION = "Evaluation: rmse, root mean squared error. Lower is better."


def case(code, strings=True, gaps=False, task="t"):
    inventory = INVENTORY.format(colour="3 values" if strings else "int64", gaps=", 3 missing" if gaps else "")
    return Case(task, DESCRIPTION, inventory, "brief", code)


def program(**values):
    return render(Spec("regression", output="raw", **values), FACTS)


def test_facts_name_calls_arguments_and_the_tasks_tables():
    code = program(model="forest", params={"n_estimators": 20, "max_depth": None, "max_features": "sqrt"}, encode="none")
    facts = outcomes.case_facts(case(code))
    assert facts["call RandomForestRegressor"] == 1 and facts["any n_estimators"] == 20
    assert facts["any max_depth = None"] == 1 and facts["RandomForestRegressor max_features = 'sqrt'"] == 1
    assert facts["tuple categorical passthrough"] == 1 and facts["strings are left in"] == 1
    assert (facts["train rows"], facts["train strings"], facts["train categories"], facts["metric rmse"]) == (40, 1, 3, 1)
    assert outcomes.case_facts(case(code, strings=False))["strings are left in"] == 0


def test_gaps_count_only_where_nothing_fills_them():
    filled, open_ = program(impute="median"), program(impute="none")
    assert outcomes.case_facts(case(open_, gaps=True))["gaps are left in"] == 1
    assert outcomes.case_facts(case(filled, gaps=True))["gaps are left in"] == 0
    assert outcomes.case_facts(case(open_))["gaps are left in"] == 0


@pytest.mark.parametrize(
    ("mistake", "fact", "value"),
    [
        ("missing import", "unbound names", 1.0),
        ("wrong variable", "unbound names", 1.0),
        ("wrong column", "unknown columns", 1.0),
        ("wrong file", "file test_data.csv", 1.0),
        ("too slow", "while", 1.0),
        ("target among the features", "", None),
        ("renamed column", "", None),
    ],
)
def test_mistakes_that_people_make_leave_a_trace(mistake, fact, value):
    sound = program()
    facts, changed = (outcomes.case_facts(case(c)) for c in (sound, MISTAKES[mistake](sound, FACTS, np.random.default_rng(1))))
    assert changed != facts
    if value is not None:
        assert changed[fact] == value and facts.get(fact, 0.0) == 0.0


def test_a_program_that_does_not_parse_has_no_facts_and_a_certain_end():
    assert outcomes.program_facts("x = (") == {}
    model = outcomes.OutcomeModel().fit([case("x = 1"), case("y = f()")], ["valid", "runtime_error"], [0.7, 0.1])
    assert [p.reward for p in model.predict([case("x = (")])] == [0.0]
    assert model.predict([]) == []


@pytest.mark.parametrize("form", ["boosting", "forest"])
def test_it_learns_that_strings_fail_only_where_there_are_any(form):
    cases, statuses, rewards = [], [], []
    for i in range(60):
        strings, none, good = i % 2 == 0, i % 3 == 0, i % 4 < 2
        code = program(encode="none" if none else "onehot", model="boosting" if good else "dummy")
        cases.append(case(code + f"# {i}\n", strings=strings))
        failed = strings and none
        statuses.append("runtime_error" if failed else "valid")
        rewards.append(0.1 if failed else (0.9 if good else 0.52))
    model = outcomes.OutcomeModel(form).fit(cases, statuses, rewards)
    bad, fine = program(encode="none"), program(encode="onehot")
    failing, spared, good, poor = model.predict(
        [case(bad), case(bad, strings=False), case(fine), case(program(encode="onehot", model="dummy"))]
    )
    assert failing.outcomes[0].status == "runtime_error" and spared.outcomes[0].status == "valid"
    assert good.reward > poor.reward > failing.reward
    assert [o.status for o in failing.outcomes] == ["runtime_error", "valid"]
    np.testing.assert_allclose([failing.p_status.sum(), failing.p_bucket.sum()], 1.0, atol=1e-6)


def test_one_kind_of_outcome_is_no_crash_and_none_is_an_error():
    model = outcomes.OutcomeModel().fit([case("x = 1"), case("y = 1")], ["runtime_error"] * 2, [0.1, 0.1])
    assert model.predict([case("z = 1")])[0].reward == pytest.approx(0.1)
    with pytest.raises(UserError, match="0 past outcomes"):
        outcomes.OutcomeModel().fit([case("(")], ["malformed"], [0.0])
