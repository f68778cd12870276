"""A language model as world model: broken answers, prompts without end, rewards that are not expectations."""

import json

import numpy as np
import pytest

from vla_wmrl.world_model import language
from vla_wmrl.world_model.language import (
    STATUSES,
    BrokenPrediction,
    Case,
    LanguageWorldModel,
    bucket_of,
    build_prompt,
    compile_gate,
    numbered,
    parse_prediction,
)

CASE = Case("wine", "Which cultivar?", "train.csv: 107 rows", "Python 3.12", "x = 1\nprint(x)\n")


def item(status, confidence, bucket=None, **changes):
    return {"status": status, "error_type": None, "error_line": None, "quality_bucket": bucket,
            "env_feedback": f"feedback of {status}", "confidence": confidence, **changes}  # fmt: skip


def answer(*items):
    return json.dumps({"reason": "because", "predictions": list(items)})


GOOD = answer(item("valid", 0.6, "mid"), item("runtime_error", 0.3, error_type="KeyError", error_line=2))


class Scripted:
    """A backend that gives written answers in order."""

    def __init__(self, *answers):
        self.answers, self.prompts = list(answers), []

    def generate(self, prompts, schema, max_tokens):
        self.prompts += prompts
        return [self.answers.pop(0) for _ in prompts]


def test_the_reward_is_an_expectation_and_the_feedback_the_second_outcomes():
    prediction = parse_prediction(GOOD)
    assert prediction.p_status == pytest.approx([0.05, 0.3, 0.05, 0.6])
    assert prediction.reward == pytest.approx(0.3 * 0.1 + 0.05 * 0.2 + 0.6 * (0.5 + 0.5 * 0.45))
    assert prediction.reward_top == pytest.approx(0.725) and prediction.feedback == "feedback of runtime_error"


def test_the_likelier_outcome_is_first_whatever_the_order_and_sums_above_one_are_scaled():
    prediction = parse_prediction(answer(item("runtime_error", 0.8), item("valid", 0.9, "high")))
    assert prediction.outcomes[0].status == "valid" and prediction.p_status == pytest.approx([0, 0.8 / 1.7, 0, 0.9 / 1.7])


@pytest.mark.parametrize("confidences", [(0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_every_pair_of_confidences_gives_a_distribution(confidences):
    prediction = parse_prediction(answer(item("valid", confidences[0], "low"), item("malformed", confidences[1])))
    assert prediction.p_status.sum() == pytest.approx(1) and (prediction.p_status >= 0).all() and 0 <= prediction.reward <= 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("I think it runs", "no JSON"),
        ('{"predictions": [', "no JSON"),
        ("[1, 2]", "no JSON"),
        ('{"predictions": []}', "list of two"),
        (answer(item("valid", 0.6, "mid")), "list of two"),
        (answer(item("valid", 0.6, "mid"), item("valid", 0.3, "low")), "both predictions"),
        (answer(item("works", 0.6), item("valid", 0.3, "low")), "unknown status"),
        (answer(item("valid", 0.6), item("malformed", 0.3)), "quality_bucket None"),
        (answer(item("valid", 0.6, "great"), item("malformed", 0.3)), "quality_bucket 'great'"),
        (answer(item("valid", 1.6, "mid"), item("malformed", 0.3)), "no number in 0..1"),
        (answer(item("valid", True, "mid"), item("malformed", 0.3)), "no number in 0..1"),
        (answer(item("valid", float("nan"), "mid"), item("malformed", 0.3)), "no number in 0..1"),
        (answer(item("valid", 0.6, "mid"), item("malformed", 0.3, error_line="two")), "error_line"),
        (answer(item("valid", 0.6, "mid"), {"status": "malformed"}), "lacks"),
        (answer(item("valid", 0.6, "mid"), "malformed"), "must be an object"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_broken(text, why):
    with pytest.raises(BrokenPrediction, match=why):
        parse_prediction(text)


def test_a_broken_answer_is_asked_for_once_more_and_then_missing():
    model = Scripted("nonsense", GOOD, "nonsense", "nonsense again", GOOD)
    world = LanguageWorldModel(model)
    assert world.predict([CASE])[0].outcomes[0].status == "valid"
    assert "could not be read (no JSON object)" in model.prompts[1]
    assert world.predict([CASE]) == [None], "missing, never a reward"
    assert (world.counts_["broken"], world.counts_["retried"], world.counts_["missing"]) == (3, 2, 1)
    assert model.answers == [GOOD], "asked twice, not more"


def test_only_the_broken_ones_of_a_batch_are_asked_again():
    model = Scripted(GOOD, "nonsense", GOOD)
    results = LanguageWorldModel(model).predict([CASE, CASE])
    assert all(results) and len(model.prompts) == 3


def test_code_that_does_not_compile_never_reaches_the_model():
    model = Scripted()
    world = LanguageWorldModel(model)
    for code in ("x = (", "", "  \n", "def f(:\n pass", "x = 1\x00", "a" * 10 + " = = 1"):
        prediction = world.predict([Case("t", "", "", "", code)])[0]
        assert (prediction.reward, prediction.reward_top, prediction.outcomes[0].status) == (0.0, 0.0, "malformed")
    assert not model.prompts and world.counts_["gated"] == 6
    assert compile_gate("x = 1\ny = (\n").error_line == 2 and compile_gate("import nothing_of_the_kind") is None


def test_a_prompt_beyond_the_context_gives_up_parts_before_it_is_missing():
    model = Scripted(GOOD, GOOD)
    model.count_tokens = len
    long = Case("t", "D" * 3000, "I" * 3000, "brief", "x = 1\n")
    whole, short = len(build_prompt(long)), len(build_prompt(long, description=False, inventory=False))
    world = LanguageWorldModel(model, max_tokens=10)
    for limit, parts in ((whole + 74, "DI"), (whole + 73, "D"), (short + 73, None)):
        model.context_tokens = limit
        result = world.predict([long])[0]
        if parts is None:
            assert result is None and world.counts_["too_long"] == 1
        else:
            assert result is not None and all(p * 100 in model.prompts[-1] for p in parts)
            assert ("I" * 100 in model.prompts[-1]) == ("I" in parts)


def test_long_programs_keep_their_first_and_last_lines_and_true_numbers():
    code = "\n".join(f"line_{i} = {i}" for i in range(1, 2001))
    text = numbered(code, 3000)
    assert len(text) <= 3000 and "   1  line_1 = 1\n" in text and "2000  line_2000 = 2000" in text and "left out" in text
    assert numbered("x = 1") == "   1  x = 1"


def test_log_probabilities_replace_confidences_where_the_model_gives_them():
    class Scoring(Scripted):
        def choice_logprobs(self, prompts, choices):
            p = [0.1, 0.2, 0.3, 0.4]
            return np.log(np.tile(p, (len(prompts), 1))) - 5.0

    prediction = LanguageWorldModel(Scoring(GOOD)).predict([CASE])[0]
    assert prediction.p_status == pytest.approx([0.1, 0.2, 0.3, 0.4]) and prediction.p_bucket.sum() == pytest.approx(1)
    assert prediction.reward_top == pytest.approx(0.725), "the papers' reward stays the first outcome's"


def test_buckets_meet_at_the_cut_points_and_the_ladder_has_one_value_a_status():
    assert [bucket_of(r) for r in (0, 0.0999, 0.1, 0.3, 0.59, 0.6, 1)] == [
        "low",
        "low",
        "fair",
        "mid",
        "mid",
        "high",
        "high",
    ]
    values = language.ladder_values(np.eye(4)[3])
    assert values == pytest.approx([0, 0.1, 0.2, 0.875]) and len(values) == len(STATUSES)


def test_the_schema_is_json_and_asks_for_what_the_parser_wants():
    required = language.SCHEMA["properties"]["predictions"]["items"]["required"]
    assert set(json.loads(json.dumps(required))) == set(item("valid", 0.5))
