"""RWML's data and rewards: a generic sentence earns nothing, what is missing is not a score, splits are clean."""

import json
from dataclasses import replace

import numpy as np
import pytest

from text_agents import alfworld
from text_agents.rwml import calibrate, collect, easy, judges, prompts, rewards, schema, triplets
from vla_wmrl.errors import UserError

SEEN = "You arrive at countertop 1. On the countertop 1, you see a apple 1, a mug 2, and a knife 1."
RETOLD = "You are now at countertop 1. On the countertop 1, you see a mug 2, a knife 1, and a apple 1."
# What RWML's judge was fooled by (its appendix D), and relatives: they fit any state and say nothing.
GENERIC = (
    "The observation will describe the contents of the countertop.",
    "You will see the objects that are on the countertop.",
    "The environment responds to the action and shows the new state.",
    "You see something.",
    "Nothing happens.",
)


def said(state):
    return f"<think>so</think><next_state>{state}</next_state>"


@pytest.fixture(scope="module")
def embedder():
    return rewards.Embedder()


def test_generic_sentences_score_zero(embedder):
    outputs = [said(text) for text in GENERIC]
    assert not rewards.embedding_rewards(outputs, [SEEN] * len(outputs), embedder, 0.2).any()


def test_the_state_itself_and_the_state_in_other_words_score_one(embedder):
    assert rewards.embedding_rewards([said(SEEN), said(RETOLD)], [SEEN] * 2, embedder, 0.2).tolist() == [1.0, 1.0]


def test_without_a_prediction_the_score_is_zero_whatever_is_written_elsewhere(embedder):
    outputs = [SEEN, f"<think><next_state>{SEEN}</next_state></think>", "<next_state>  </next_state>", ""]
    assert not rewards.embedding_rewards(outputs, [SEEN] * 4, embedder, 0.2).any()
    assert rewards.rouge_reward(SEEN, SEEN) == 0.0


def test_each_text_is_embedded_once_and_batches_change_nothing():
    one = rewards.Embedder(batch_size=1)
    many = rewards.Embedder(batch_size=64)
    texts = [SEEN, RETOLD, SEEN, GENERIC[0]]
    np.testing.assert_allclose(one(texts), many(texts), atol=1e-5)
    assert many.computed == 3
    many(texts)
    assert many.computed == 3
    np.testing.assert_allclose(np.linalg.norm(many(texts), axis=1), 1.0, atol=1e-5)


def test_a_cache_that_is_too_small_costs_time_and_not_results():
    small = rewards.Embedder(cache_size=1)
    assert small([SEEN, RETOLD, SEEN]).shape == (3, 384)


def test_a_missing_embedder_says_which_package():
    with pytest.raises(UserError, match="pip install no-such-embedder"):
        rewards.Embedder("package:no-such-embedder")
    with pytest.raises(UserError, match="no sentence-transformers model at"):
        rewards.Embedder("/no/such/folder")


def test_tool_answers_are_scored_in_fifths_by_rouge():
    true = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "zip": {"type": "string"}}})
    assert rewards.rouge_reward(said(true), true) == 1.0
    part = rewards.rouge_reward(said('{"type": "object", "properties": {"name": {"type": "string"}}}'), true)
    assert 0.0 < part < 1.0 and part * 5 == pytest.approx(round(part * 5))
    assert rewards.rouge_reward(said("sorry"), true) == 0.0
    assert rewards.rouge_reward(said("[]"), "[]") == 1.0 and rewards.rouge_reward(said("{}"), "[]") == 0.0


def test_rewards_go_by_the_kind_of_the_next_state(embedder):
    found = rewards.rewards([said(SEEN), said("a b"), "x"], [SEEN, "a b", "x"], ["alfworld", "tool", "user"], embedder)
    assert found.tolist() == [1.0, 1.0, 0.0]


def test_a_judge_that_gives_no_score_is_left_out_and_not_zero():
    answers = ['{"analysis": "", "score": 0.7}', '{"score": 0.7}', "I cannot say", '{"score": 7}', '{"score": null}']
    assert [judges.score_in(answer, binary=i == 0) for i, answer in enumerate(answers)] == [1.0, 0.7, None, None, None]
    [about] = triplets.from_episode("alfworld", "t", "find it", 0, ["look"], ["A room.", "A pen."])
    asked = []
    judge = judges.Judge(lambda questions: asked.append(questions) or [""] * len(questions), binary=True)
    given = judge([said("A pen."), "no tags", said("A pen.")], [about] * 3)
    assert np.isnan(given[[0, 2]]).all() and given[1] == 0.0
    assert len(asked) == 1 and len(asked[0]) == 1 and "A room." in asked[0][0]  # the same is asked once, no tags never


def test_the_threshold_is_the_largest_that_is_precise_enough():
    same, other = np.linspace(0.0, 0.3, 301), np.linspace(0.2, 0.8, 601)
    found = calibrate.propose(same, other, precision=0.99)
    assert 0.2 <= found.tau <= 0.22 and found.precision >= 0.99 and found.recall > 0.6
    assert calibrate.propose(np.array([0.4] * 9), np.array([0.1] * 9), 0.9).tau is None
    with pytest.raises(UserError, match="both kinds"):
        calibrate.propose(np.array([]), other)


def test_calibration_with_a_real_embedder_tells_states_apart(embedder):
    states = [
        f"You arrive at {place} {i}. On the {place} {i}, you see a {thing} 1, a pen {i}, and a mug 2."
        for place in ("desk", "shelf")
        for i in (1, 2)
        for thing in ("book", "vase")
    ]
    states += [
        "You open the fridge 1. The fridge 1 is open. In it, you see a egg 1, and a apple 2.",
        "Nothing happens.",
    ]
    found, facts = calibrate.measure(states, embedder, pairs=60, precision=0.6)
    assert facts["states"] == 10 and facts["other_pairs"] == 60
    assert facts["retold_distance_quantiles"]["0.5"] < facts["other_distance_quantiles"]["0.5"]
    assert found.tau is None or 0 < found.tau <= 0.5


def test_a_proposed_threshold_pays_nothing_for_phrases_without_facts(embedder):
    """It proposed 0.35 for MiniLM, at which "you see nothing" is right about most places, whatever is there."""
    things = ("book", "vase", "pen", "mug", "lamp", "egg")
    states = [f"You arrive at shelf {i}. On the shelf {i}, you see a {a} {i}, and a {b} 2." for i, (a, b) in enumerate(
        (a, b) for a in things for b in things if a < b)]  # fmt: skip
    found, facts = calibrate.measure(states, embedder, pairs=40, precision=0.95)
    assert facts["hollow_pairs"] == 15 and found.tau <= facts["hollow_distance_quantiles"]["0.5"]
    assert calibrate.hollow("On the shelf 1, you see nothing.") is None and calibrate.hollow("Nothing happens.") is None


def test_only_what_is_always_right_is_too_easy_and_a_missing_reward_does_not_count():
    table = np.array([[1, 1, 1], [1, 0, 1], [1, 1, np.nan], [np.nan] * 3])
    assert easy.flag(table).tolist() == [True, False, True, False]
    assert easy.flag(table, share=0.6).tolist() == [True, True, True, False]


def test_what_is_kept_does_not_depend_on_order_and_keeps_one_in_ten():
    ids = [str(i) for i in range(4000)]
    flagged = np.arange(4000) % 4 == 0
    kept = easy.keep(ids, flagged)
    assert kept[~flagged].all() and 0.07 < kept[flagged].mean() < 0.13
    order = np.random.default_rng(0).permutation(4000)
    assert (easy.keep([ids[i] for i in order], flagged[order]) == kept[order]).all()
    assert easy.report(flagged, kept)["flagged"] == 0.25


def test_schemas_hold_no_values():
    text = json.dumps({"user": {"name": "Yusuf", "zip": "19122"}, "orders": ["#W1", "#W2"], "n": 3, "ok": True})
    masked = schema.mask_answer(text)
    assert not any(word in masked for word in ("Yusuf", "19122", "#W1", "3"))
    assert json.loads(masked)["properties"]["orders"] == {"type": "array", "items": {"type": "string"}}
    assert schema.mask_answer("Order cancelled") == "Order cancelled" and schema.mask_answer("12") == "12"


def test_ids_as_keys_are_values_too():
    masked = schema.schema_of({"9523456873": {"price": 1.5}, "6086499569": {"price": 2.5, "size": "m"}})
    assert masked == {
        "type": "object",
        "additionalProperties": {
            "type": "object", "properties": {"price": {"type": "number"}, "size": {"type": "string"}},
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def collected(games):
    rows = []
    for game in games[:3]:
        for rollout in range(2):
            rows += collect.of_alfworld(game, alfworld.play(game, alfworld.random_agent, seed=rollout, max_steps=5), rollout)
    return rows


def test_a_triplet_holds_what_came_before_and_not_what_comes_after(collected):
    third = collected[2]
    assert third.step == 2 and [a for a, _ in third.turns] == [collected[0].action, collected[1].action]
    assert third.observation == collected[1].next_state
    assert prompts.predict(replace(third, next_state="something else")) == prompts.predict(third)
    assert third.action in prompts.predict(third)
    assert rewards.predicted_state(prompts.sft_label(third)) == third.next_state.strip()


def test_triplets_survive_the_file_and_the_card_counts_them(collected, tmp_path):
    unique = triplets.without_duplicates([*collected, collected[0]])
    assert len(unique) == len({t.id for t in collected})
    train, val = triplets.split_by_task(unique)
    assert not {t.task_id for t in train} & {t.task_id for t in val}
    card = triplets.write(tmp_path, {"train": train, "val": val}, {"games_hash": "x"})
    assert triplets.read(tmp_path, "train") == train and card["splits"]["val"]["triplets"] == len(val)
    assert card["splits"]["train"]["duplicates"] == 0
    with pytest.raises(UserError, match="no triplets for split"):
        triplets.write(tmp_path, {"train": []}, {})
    with pytest.raises(UserError, match="cannot be split"):
        triplets.split_by_task([t for t in unique if t.task_id == unique[0].task_id])
    with pytest.raises(UserError, match="vla-wmrl text triplets"):
        triplets.read(tmp_path, "test")


def test_invalid_actions_can_be_thinned_and_valid_ones_cannot(games):
    game = games[0]
    episode = alfworld.play(game, lambda seen, done, rng: "fly" if len(done) % 2 else "look", max_steps=6)
    rows = collect.of_alfworld(game, episode, 0)
    assert [t.valid_action for t in rows] == [True, False] * 3
    assert [t.action for t in triplets.drop_invalid(rows, keep=0.0)] == ["look"] * 3


def test_tau2_triplets_mask_answers_and_do_not_say_what_the_user_wants():
    from text_agents import tau2_data
    from text_agents.tau2 import Tau2Task

    rows = collect.of_tau2(Tau2Task("retail", "0"))
    wants = tau2_data.task("retail", "0").user_scenario.instructions.reason_for_call
    tools = [t for t in rows if t.kind == "tool"]
    assert rows[-1].kind == "user" and tools and all(wants not in t.task for t in rows)
    known = [t for t in tools if t.next_state.startswith("{")]
    assert known and all(json.loads(t.next_state)["type"] == "object" for t in known)


def test_an_agents_command_is_read_from_its_tags_or_from_its_end():
    assert prompts.command_in("<think>x</think><action> go to  desk 1 </action>") == ("go to desk 1", True)
    assert prompts.command_in("<action>look</action>") == ("look", False)
    assert prompts.command_in("x" * 40 + " look") == (("x" * 40 + " look")[-30:], False)
