"""What a prompt determines is told apart from what nobody can know; an agent that comes back makes enough of it."""

import re

import pytest

from text_agents import alfworld
from text_agents.config import RwmlConfig
from text_agents.rwml import collect, evaluate, known, rewards, triplets

DESK = "You arrive at desk 1. On the desk 1, you see a mug 1, a pen 2, and a cup 1."
SAFE = "You open the safe 1. The safe 1 is open. In it, you see a cd 2."


def words(text):
    """Those of a text, in any order: what is moved back to where it was has its old place in the list."""
    return sorted(re.findall(r"\w+", text))


def memory(*texts):
    found = known.Memory()
    for text in texts:
        found.read(text)
    return found


@pytest.fixture(scope="module")
def collected(games):
    return [
        t
        for game in games
        for t in collect.of_alfworld(game, alfworld.play(game, alfworld.returning_agent(game), max_steps=25), 0)
    ]


def test_what_is_called_known_is_what_the_game_then_says(collected):
    for turns in (2, 100):
        for t in collected:
            text, kind = known.foretell(t, t.turns[-turns:])
            assert (text is None) == (kind is None)
            assert text is None or words(text) == words(t.next_state)


def test_an_agent_that_comes_back_makes_states_that_can_be_known_and_a_random_one_hardly(collected, games):
    def share(rows):
        found = known.shares(rows, 2)
        assert sum(found[k] for k in ("action", "history", "not")) == pytest.approx(1.0)
        return found["history"]

    wandering = [
        t for game in games for t in collect.of_alfworld(game, alfworld.play(game, alfworld.random_agent, max_steps=25), 0)
    ]
    assert share(collected) > 0.25 > share(wandering)


def test_an_agent_used_for_two_episodes_plays_the_second_like_the_first(games):
    agent = alfworld.returning_agent(games[0])
    first, second = (alfworld.play(games[0], agent, max_steps=20) for _ in range(2))
    assert first.commands == second.commands and not first.invalid
    assert alfworld.play(games[0], agent, seed=1, max_steps=20).commands != first.commands


def test_what_was_taken_is_gone_and_what_was_moved_is_there():
    left = memory(DESK, "You pick up the pen 2 from the desk 1.")
    assert left.after("go to desk 1") == ("You arrive at desk 1. On the desk 1, you see a mug 1, and a cup 1.", "history")
    assert left.after("inventory")[0] == "You are carrying: a pen 2."
    left.read("You move the pen 2 to the desk 1.")
    assert left.after("examine desk 1")[0] == "On the desk 1, you see a pen 2, a mug 1, and a cup 1."
    assert left.after("inventory")[0] == "You are not carrying anything."


@pytest.mark.parametrize(
    ("texts", "command", "said"),
    [
        ((DESK,), "go to desk 2", None),
        ((DESK,), "inventory", None),
        ((DESK,), "examine mug 1", None),
        ((DESK,), "look", None),
        ((), "open safe 1", None),
        (("You arrive at safe 1. The safe 1 is closed.",), "open safe 1", None),
        (("You arrive at safe 1. The safe 1 is closed.",), "go to safe 1", "You arrive at safe 1. The safe 1 is closed."),
        ((SAFE, "You close the safe 1."), "go to safe 1", "You arrive at safe 1. The safe 1 is closed."),
        ((SAFE, "You close the safe 1."), "open safe 1", SAFE),
        ((SAFE,), "go to safe 1", SAFE.replace("You open the", "You arrive at")),
        ((SAFE, "You pick up the cd 2 from the safe 1."), "examine safe 1", "The safe 1 is open. In it, you see nothing."),
        (("You turn on the desklamp 1.",), "use desklamp 1", "You turn on the desklamp 1."),
        ((), "heat egg 1 with microwave 1", "You heat the egg 1 using the microwave 1."),
    ],
)
def test_only_what_the_texts_say_is_foretold(texts, command, said):
    assert memory(*texts).after(command)[0] == said


def test_a_turn_that_the_prompt_does_not_show_is_not_known():
    [*_, t] = triplets.from_episode("alfworld", "g", "find it", 0, ["go to bed 1", "go to desk 1"], [DESK, "A bed.", DESK])
    assert known.foretell(t) == (DESK, "history") and known.foretell(t, []) == (None, None)


def test_a_probe_in_other_words_changes_what_is_read_and_neither_the_triplet_nor_the_truth(collected):
    some = next(t for t in collected if t.step > 3 and "," in t.observation)
    again = evaluate.retold(some)
    assert again == evaluate.retold(some) and (again.history, again.observation) != (some.history, some.observation)
    assert (again.action, again.next_state, [a for a, _ in again.turns]) == (
        some.action,
        some.next_state,
        [a for a, _ in some.turns],
    )
    tau = RwmlConfig().reward.tau
    embedder = rewards.Embedder()
    assert embedder.distances([again.observation], [some.observation])[0] < tau


def test_shares_of_what_can_be_known_are_counted_apart():
    rows = [
        {"reward": float(i < 2), "exact": False, "predicted": "x", "ended": True, "tokens": 3, "dropped_turns": 0,
         "kind": "alfworld", "action": "look", "known": kind}
        for i, kind in enumerate(["history", "action", "history", None])
    ]  # fmt: skip
    found = evaluate.summary(rows)
    assert (found["accuracy"], found["accuracy_known_history"], found["accuracy_known_action"]) == (0.5, 0.5, 1.0)
    assert found["n_known"] == 3 and found["low_known"] < found["accuracy_known"] < found["high_known"]
    assert "n_known" not in evaluate.summary([row | {"known": None} for row in rows])
