"""Step-level advantages on examples small enough to do by hand."""

import numpy as np
import pytest

from text_agents.rl.gigpo import step_advantages

# Three episodes from "hall": one wins from the kitchen, one goes there and fails, one fails elsewhere.
SEEN = [["hall", "kitchen"], ["hall", "kitchen", "hall"], ["hall"]]


def test_turns_are_compared_with_turns_that_saw_the_same():
    first, second, third = step_advantages(np.array([1.0, 0.0, 0.0]), SEEN, gamma=1.0)
    # hall: returns 1 | 0, 0 | 0, mean 1/4; kitchen: 1 | 0, mean 1/2
    np.testing.assert_allclose(first, [0.75, 0.5])
    np.testing.assert_allclose(second, [-0.25, -0.5, -0.25])
    np.testing.assert_allclose(third, [-0.25])


def test_discounting_prefers_the_shorter_way_even_where_all_succeed():
    short, long = step_advantages(np.ones(2), [["hall", "kitchen"], ["hall", "bath", "kitchen"]], gamma=0.5)
    # hall: 1/2 and 1/4; kitchen: 1 and 1; bath: alone
    np.testing.assert_allclose(short, [0.125, 0.0])
    np.testing.assert_allclose(long, [-0.125, 0.0, 0.0])


def test_the_standard_deviation_is_the_step_groups_own():
    first, second = step_advantages(np.array([1.0, 0.0]), [["hall"], ["hall"]], gamma=1.0, scale="std")
    assert first[0] == pytest.approx(1.0, abs=1e-3) and second[0] == pytest.approx(-1.0, abs=1e-3)


def test_a_missing_reward_enters_no_mean_and_gets_nothing():
    first, second, third = step_advantages(np.array([1.0, np.nan, 0.0]), SEEN, gamma=1.0)
    np.testing.assert_allclose(first, [0.5, 0.0])  # the kitchen has one valid visitor left
    assert not second.any() and third[0] == -0.5


def test_the_order_of_episodes_changes_nothing():
    rng = np.random.default_rng(0)
    seen = [[str(rng.integers(4)) for _ in range(rng.integers(1, 6))] for _ in range(8)]
    rewards, order = rng.random(8), rng.permutation(8)
    plain = step_advantages(rewards, seen)
    moved = step_advantages(rewards[order], [seen[i] for i in order])
    for i, place in enumerate(order):
        np.testing.assert_allclose(moved[i], plain[place], atol=1e-12)
