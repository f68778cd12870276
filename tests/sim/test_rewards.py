"""Rewards of branches: what counts as a milestone; where groups begin."""

from types import SimpleNamespace

import numpy as np
import pytest

from sim.execute import GroupExecutor
from sim.libero import EnvSpec
from sim.rewards import branch_margin, branch_reward, mark, milestones, passes_next
from sim.rollout import PolicyRef
from sim.starts import BranchStarts
from vla_wmrl.config import GroupsConfig
from vla_wmrl.types import Start


@pytest.mark.parametrize(
    ("progress", "share"),
    [(0.0, 0.0), (0.21, 0.0), (0.27, 0.25), (0.45, 0.25), (0.5, 0.5), (0.7, 0.5), (0.77, 0.75), (0.95, 0.75), (1.0, 1.0)],
)
def test_milestones_of_two_conjuncts_are_picked_up_and_done(progress, share):
    assert milestones(progress, 2) == share


def test_approaching_without_picking_up_is_worth_nothing_as_a_milestone_but_something_as_progress():
    rollout = SimpleNamespace(progress=np.array([0.02, 0.2], np.float32), start=Start(0, 0))
    assert branch_reward("milestone", {0: 2})(rollout) == 0.0
    assert branch_reward("stage", {0: 2})(rollout) == 0.2
    assert branch_reward("progress", {0: 2})(rollout) == pytest.approx(0.2)


def test_states_from_which_the_policy_always_or_never_goes_on_are_drawn_less():
    holding, open_, stuck = (Start(0, i, passed=p, waited=w) for i, (p, w) in enumerate([(0.25, 0), (0.0, 2), (0.0, 11)]))
    bank = BranchStarts([0], seed=0)
    bank.extend([holding, open_, stuck] * 10)
    bank.observe([holding] * 20 + [open_] * 20 + [stuck] * 20, [1.0] * 20 + [1.0, 0.0] * 10 + [0.0] * 20)
    drawn = [s.init_id for step in range(20) for s in bank.draw(step, 10)]
    assert drawn.count(1) > 0.8 * len(drawn)
    bank.observe([stuck] * 3, [np.nan] * 3)
    assert bank.learnability((0, 0, 5)) < 0.03  # an outcome that is not known is not a failure


def test_a_milestone_counts_when_it_is_passed_not_only_where_the_branch_ends():
    start = Start(0, 0, passed=0.0)
    grasped_and_lost = SimpleNamespace(progress=np.array([0.1, 0.3, 0.1], np.float32), start=start)
    assert branch_reward("next", {0: 2})(grasped_and_lost) == 1.0
    assert branch_reward("milestone", {0: 2})(grasped_and_lost) == 0.0
    again = SimpleNamespace(progress=np.array([0.1, 0.3, 0.3], np.float32), start=Start(0, 0, passed=0.25))
    assert branch_reward("next", {0: 2})(again) == 0.0


def test_a_margin_is_not_negative_exactly_where_the_next_milestone_was_passed():
    rng = np.random.default_rng(0)
    for passed in (0.0, 0.25, 0.5, 0.75):
        for path in rng.uniform(size=(200, 4)).astype(np.float32):
            branch = SimpleNamespace(progress=path, start=Start(0, 0, passed=passed))
            assert (branch_margin({0: 2})(branch) >= 0) == (branch_reward("next", {0: 2})(branch) == 1.0)
    near, far = (SimpleNamespace(progress=np.array([0.1, best, 0.1], np.float32), start=Start(0, 0)) for best in (0.25, 0.15))
    assert 0 > branch_margin({0: 2})(near) > branch_margin({0: 2})(far)


def test_starts_know_what_their_rollout_had_passed_and_how_long_ago():
    path = [0.1, 0.3, 0.3, 0.1, 0.6, 0.6]
    marked = mark([Start(0, 0, look=k) for k in range(5)], path, 2)
    assert [(s.passed, s.waited) for s in marked] == [(0.0, 0), (0.25, 0), (0.25, 1), (0.25, 2), (0.5, 0)]
    later = mark([Start(0, 0, passed=0.5, waited=3)] * 3, [0.6, 0.1, 0.1], 2)
    assert [(s.passed, s.waited) for s in later] == [(0.5, 3), (0.5, 4), (0.5, 5)]


def test_whether_a_milestone_followed_is_unknown_where_the_rollout_ends_too_early():
    np.testing.assert_array_equal(passes_next([0.0, 0.0, 0.3, 0.3, 0.3, 0.3], 2, 2), [1.0, 1.0, 0.0, 0.0, np.nan])


@pytest.mark.parametrize(("kind", "expected"), [("branch", 1), ("episode", None)])
def test_whole_episodes_explore_at_every_look_not_at_the_first_alone(tmp_path, monkeypatch, kind, expected):
    asked = []
    pool = SimpleNamespace(submit=lambda jobs, then: asked.extend(jobs))
    groups = GroupsConfig(kind=kind, explore_looks=1)
    executor = GroupExecutor(
        pool, {0: EnvSpec()}, PolicyRef(""), learner=None, groups=groups, folder=tmp_path, conjuncts={0: 2}
    )
    monkeypatch.setattr(executor, "publish", lambda: PolicyRef(""))
    executor([Start(0, 0)], 2, (0, 0))
    assert [job.explore_looks for job in asked] == [expected]
