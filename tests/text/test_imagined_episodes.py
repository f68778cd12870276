"""A language model in place of the games: the rule for success against the games' own, and what a predictor may do."""

import numpy as np
import pytest

from text_agents import alfworld
from text_agents.alfworld_goal import Goal, goal_of, reached
from text_agents.dialogues import Reply
from text_agents.language_policy import LanguagePolicy
from text_agents.rl.config import LanguageWorldSection
from text_agents.rl.imagine import LanguageWorld
from vla_wmrl.types import Start

FORMS = {
    "put a mug in desk.": Goal("place", "mug", "desk"),
    "put some mug on desk.": Goal("place", "mug", "desk"),
    "put a clean mug in desk.": Goal("place", "mug", "desk", "clean"),
    "heat some egg and put it in fridge.": Goal("place", "egg", "fridge", "hot"),
    "put a cool pan in stoveburner.": Goal("place", "pan", "stoveburner", "cool"),
    "examine the book with the desklamp.": Goal("lamp", "book", "desklamp"),
    "look at cd under the desklamp.": Goal("lamp", "cd", "desklamp"),
    "put two pen in shelf.": Goal("two", "pen", "shelf"),
    "find two pen and put them in shelf.": Goal("two", "pen", "shelf"),
}


def test_every_form_of_a_task_is_read():
    assert {task: goal_of(task) for task in FORMS} == FORMS
    assert goal_of("dance a waltz.") is None


def test_the_rule_agrees_with_the_games_at_every_step(parity_games, games):
    for game in dict.fromkeys([*parity_games, *games]):
        goal = goal_of(game.task)
        for agent in (alfworld.walkthrough_agent(game), alfworld.random_agent):
            env, rng = alfworld.AlfworldEnv(25), np.random.default_rng(0)
            now = env.reset(game)
            texts, commands = [now.text], []
            for _ in range(25):
                commands.append(agent(now, commands, rng))
                result = env.step(commands[-1])
                now = result.observation
                texts.append(now.text)
                assert reached(goal, texts) == result.terminated, (game.name, commands)
                if result.terminated:
                    break


@pytest.mark.parametrize(
    ("task", "texts", "done"),
    [
        ("put a mug in desk.", ["On the desk 1, you see a mug 1."], False),  # it lay there
        ("put a mug in desk.", ["You pick up the mug 1 from the bed 1.", "You move the mug 1 to the desk 2."], True),
        ("put a clean mug in desk.", ["You move the mug 1 to the desk 1."], False),
        ("put a hot mug in desk.", ["You heat the mug 1 using the microwave 1.", "You cool the mug 1 using the fridge 1.",
                                    "You move the mug 1 to the desk 1."], False),
        ("put two pen in desk.", ["You move the pen 1 to the desk 1.", "You move the pen 2 to the desk 2."], False),
        ("put two pen in desk.", ["On the desk 1, you see a pen 2, and a mug 1.", "You move the pen 1 to the desk 1."], True),
        ("put two pen in desk.", ["The desk 1 is open. In it, you see a pen 2.", "You pick up the pen 2 from the desk 1.",
                                  "You move the pen 1 to the desk 1."], False),
        ("look at cd under the desklamp.", ["You turn on the desklamp 1."], False),
        ("look at cd under the desklamp.", ["You pick up the cd 1 from the bed 1.", "You turn on the desklamp 1."], True),
    ],
)  # fmt: skip
def test_what_the_texts_say_decides(task, texts, done):
    assert reached(goal_of(task), texts) is done


@pytest.fixture
def world(tiny_model, games):
    return LanguageWorld(LanguagePolicy.from_pretrained(str(tiny_model)), games, 20, LanguageWorldSection(kind="language"))


def answers(world, monkeypatch, reply_of):
    """The predictor answers `reply_of(prompt as text)`; returns the prompts that it was asked."""
    asked = []

    def sample(prompts, copies, max_new_tokens, **more):
        texts = [world.predictor.tokenizer.decode(p) for p in prompts]
        asked.extend(texts)
        return [Reply(world.predictor.tokenizer(reply_of(t))["input_ids"], [], True) for t in texts]

    monkeypatch.setattr(world.predictor, "sample", sample)
    return asked


def test_with_a_perfect_predictor_an_imagined_episode_is_the_real_one(world, games, monkeypatch):
    env, game = alfworld.AlfworldEnv(20), games[2]
    [imagined], real = world.reset([Start(2, 0)]), env.reset(game)
    assert imagined.text == real.text and imagined.task == game.task and imagined.admissible == ()
    for command in ["dance", *game.walkthrough]:
        result = env.step(command)
        text = result.observation.text
        asked = answers(world, monkeypatch, lambda _, text=text: f"<think>x</think><next_state>{text}</next_state>")
        [predicted] = world.step([0], [command], [(0,)])
        assert predicted.observation.text == text and predicted.terminated == result.terminated
        assert predicted.info["kind"] == result.info["kind"] and predicted.reward == result.reward
        assert f"Potential action:\n{command}" in asked[0]
    assert predicted.terminated


def test_an_answer_without_a_state_ends_the_episode_without_a_reward(world, monkeypatch):
    world.reset([Start(0, 0)])
    answers(world, monkeypatch, lambda _: "I do not know")
    [result] = world.step([0], ["look"], [(0,)])
    assert result.reward is None and result.truncated and not result.terminated and result.info["kind"] == "missing"


def test_members_that_ask_the_same_are_answered_once_and_the_limit_of_steps_holds(world, monkeypatch):
    world.max_steps = 1
    world.reset([Start(0, 0)] * 3)
    asked = answers(world, monkeypatch, lambda _: "<next_state>Nothing happens.</next_state>")
    results = world.step([0, 1, 2], ["look", "look", ""], [(0,)] * 3)
    assert len(asked) == 2 and world.asked == 3
    assert all(r.truncated and r.reward == 0.0 and r.info["kind"] == "invalid" for r in results)
