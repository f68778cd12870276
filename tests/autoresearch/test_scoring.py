"""Scores that would be reported wrongly: ranks, medals, gaps, the reward ladder."""

import numpy as np
import pytest

from text_agents.autoresearch import scoring

BOARD = np.array([0.9, 0.8, 0.8, 0.5])


@pytest.mark.parametrize(
    ("score", "higher", "place"),
    [(0.95, True, 1), (0.9, True, 1), (0.8, True, 2), (0.7, True, 4), (0.1, True, 5), (0.4, False, 1),
     (0.8, False, 2), (1.0, False, 5)],
)  # fmt: skip
def test_ties_take_the_better_place_in_either_direction(score, higher, place):
    assert scoring.position(score, BOARD, higher) == place


def test_human_rank_is_the_mean_over_both_boards():
    boards = {"private": BOARD, "public": np.array([0.99, 0.98])}
    assert scoring.human_rank(0.85, boards, True) == pytest.approx((3 / 4 + 0.0) / 2)
    assert scoring.human_rank(1.0, boards, True) == 1.0
    assert np.isnan(scoring.human_rank(float("nan"), boards, True))


def test_the_gap_is_zero_below_the_baseline_and_may_pass_one():
    assert scoring.performance_gap(0.5, 0.6, 0.9) == 0.0
    assert scoring.performance_gap(1.0, 2.0, 1.5) == 2.0, "lower is better by the sign of best - baseline"
    assert scoring.performance_gap(float("nan"), 0.6, 0.9) == 0.0
    with pytest.raises(ValueError, match="equal"):
        scoring.performance_gap(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("n", "places"),
    [(5, (1, 1, 2)), (99, (9, 19, 39)), (200, (10, 40, 80)), (999, (11, 50, 100)), (3242, (16, 162, 324))],
)
def test_medal_places_follow_kaggles_table(n, places):
    assert tuple(scoring.medal_places(n).values()) == places


def test_a_medal_needs_the_score_of_the_last_place_that_earns_it():
    board = np.arange(201.0)
    assert [scoring.medal(s, board, True) for s in (200, 191, 190, 161, 160, 121, 120)] == [
        "gold", "gold", "silver", "silver", "bronze", "bronze", None]  # fmt: skip
    assert scoring.medal(0, board, False) == "gold" and scoring.medal(150, board, False) is None


def test_the_ladder_orders_outcomes_and_what_nobody_graded_is_missing():
    rewards = [scoring.reward(s) for s in ("malformed", "runtime_error", "no_submission")]
    assert [*rewards, scoring.reward("valid", 0.0), scoring.reward("valid", 1.0)] == [0.0, 0.1, 0.2, 0.5, 1.0]
    assert np.isnan(scoring.reward("ungraded"))


def test_a_trajectory_is_worth_its_best_turn_and_missing_turns_are_left_out():
    nan = float("nan")
    assert scoring.trajectory_reward([0.1, nan, 0.7, 0.2]) == 0.7
    assert np.isnan(scoring.trajectory_reward([nan, nan])) and np.isnan(scoring.trajectory_reward([]))


def test_the_view_of_a_board_shows_the_first_the_neighbours_and_the_entry_itself():
    board = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    lines = scoring.around(0.55, board, True, n=1).splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "0.9"], ["4", "0.6"], ["5", "0.55"], ["6", "0.5"]]
    assert lines[2].endswith("<- this one")
    assert scoring.around(0.1, board, False).splitlines()[0].split()[:2] == ["1", "0.1"]
    assert scoring.around(2.0, board, False).splitlines()[-1].split()[:2] == ["7", "2"]
