"""Rewards of branches: what counts as a milestone; where groups begin."""

from types import SimpleNamespace

import numpy as np
import pytest

from sim.execute import GroupExecutor
from sim.libero import EnvSpec
from sim.rewards import branch_reward, milestones
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


def test_stages_without_contrast_are_drawn_less():
    bank = BranchStarts([0], seed=0)
    bank.extend(Start(0, i, progress=p) for i, p in enumerate(np.repeat([0.25, 0.85], 10)))
    before = np.mean([s.progress for step in range(40) for s in bank.draw(step, 10)])
    sure, open_ = Start(0, 0, progress=0.85), Start(0, 0, progress=0.25)
    bank.observe([sure] * 30 + [open_] * 30, [False] * 30 + [True] * 30)
    after = [s.progress for step in range(40) for s in bank.draw(step, 10)]
    assert 0.5 < before < 0.6 and 0.25 < np.mean(after) < 0.3


@pytest.mark.parametrize(("kind", "expected"), [("branch", 1), ("episode", None)])
def test_whole_episodes_explore_at_every_look_not_at_the_first_alone(tmp_path, monkeypatch, kind, expected):
    asked = []
    pool = SimpleNamespace(map=lambda jobs: asked.extend(jobs) or [[] for _ in jobs])
    groups = GroupsConfig(kind=kind, explore_looks=1)
    executor = GroupExecutor(pool, {0: EnvSpec()}, PolicyRef(""), learner=None, groups=groups, folder=tmp_path)
    monkeypatch.setattr(executor, "publish", lambda: PolicyRef(""))
    executor([Start(0, 0)], 2, (0, 0)).result()
    assert [job.explore_looks for job in asked] == [expected]
