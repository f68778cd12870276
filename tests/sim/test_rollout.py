"""Rollouts of a real policy class in the real simulator."""

from dataclasses import replace

import numpy as np
import pytest

from sim.libero import EnvSpec, LiberoEnv
from sim.rollout import PolicyRef, RolloutJob, run
from sim.starts import BranchStarts, pack, unpack
from sim.workers import Context
from vla_wmrl.types import Start


@pytest.fixture(scope="module")
def policy(policy_folder):
    return PolicyRef(str(policy_folder), eta=0.5).load(Context(0))


def job(starts, **changes):
    base = RolloutJob(EnvSpec(), tuple(starts), (0,) * len(starts), PolicyRef(""), (0,), max_looks=2, width=2, record=True)
    return replace(base, **changes)


@pytest.fixture(scope="module")
def recorded(env, policy):
    starts = [Start(0, i, split="official") for i in range(3)]
    return run(env, policy, job(starts, keep_starts=True))


def test_a_rollout_does_not_depend_on_what_runs_beside_it(env, policy, recorded):
    alone = run(env, policy, job([Start(0, 1, split="official")]))[0].rollout
    np.testing.assert_array_equal(alone.states, recorded[1].rollout.states)
    np.testing.assert_array_equal(alone.chain, recorded[1].rollout.chain)


def test_noise_differs_between_members_of_a_group(env, policy):
    start = Start(0, 0, split="official")
    a, b = run(env, policy, job([start, start], members=(0, 1), max_looks=1))
    assert not np.array_equal(a.rollout.chain, b.rollout.chain)


def test_only_the_executed_part_of_a_chunk_is_marked(recorded):
    for item in recorded:
        executed = item.rollout.executed
        assert executed[:, :8].all() and not executed[:, 8:].any()
        assert item.rollout.steps == executed.sum() == len(item.trace.actions)


def test_a_limit_is_a_truncation_never_a_success(env, policy):
    rollout = run(env, policy, job([Start(0, 0, split="official")], max_looks=None, max_steps=12))[0].rollout
    assert rollout.truncated and not rollout.terminated and not rollout.success
    assert rollout.executed.sum(1).tolist() == [8, 4] and rollout.steps == 12


def test_success_inside_a_chunk_masks_what_follows(env, policy, monkeypatch):
    original, count = LiberoEnv.step, iter(range(1000))
    monkeypatch.setattr(LiberoEnv, "step", lambda self, a, sample=False: original(self, a, sample) or next(count) == 10 + 10)
    rollout = run(env, policy, job([Start(0, 0, split="official")], max_looks=5, width=1))[0].rollout
    assert rollout.success and rollout.terminated and not rollout.truncated
    assert rollout.executed.sum(1).tolist() == [8, 3] and rollout.progress[-1] == 1.0


def test_a_branch_continues_its_rollout_exactly(env, policy, recorded):
    second = recorded[0].starts[1]
    assert second.look == 1 and second.state is not None
    branch = run(env, policy, job([second], max_looks=1))[0].rollout
    np.testing.assert_array_equal(branch.states[0], recorded[0].rollout.states[1])
    np.testing.assert_array_equal(branch.inputs["features"][0], recorded[0].rollout.inputs["features"][1])


def test_branches_of_branches_keep_noise_keys_in_range_and_apart(env, policy, recorded):
    start, seen = recorded[0].starts[1], set()
    for step in range(8):
        branch = job([start], seed=(0, step), max_looks=2, keep_starts=True)
        start = run(env, policy, branch)[0].starts[1]
        assert 0 <= start.episode < 2**63
        seen.add(start.key)
    assert len(seen) == 8


def test_branch_starts_survive_packing_and_a_draw_depends_on_seed_and_step(recorded):
    starts = [s for item in recorded for s in item.starts]
    again = unpack(pack(starts))
    for a, b in zip(starts, again, strict=True):
        assert a.key == b.key and a.split == b.split
        np.testing.assert_array_equal(a.snapshot.physics, b.snapshot.physics)
        assert a.snapshot.model == b.snapshot.model != 0
        np.testing.assert_array_equal(a.state, b.state)
    bank = BranchStarts([0], seed=3)
    bank.extend(starts)
    assert [s.key for s in bank.draw(5, 4)] == [s.key for s in bank.draw(5, 4)]
    assert len({tuple(s.key for s in bank.draw(k, 4)) for k in range(6)}) > 1
    bank.observe(starts, [1.0] * len(starts))
    resumed = BranchStarts([0], seed=3)
    resumed.load_state_dict(bank.state_dict())
    assert {k: list(v) for k, v in resumed.seen_.items()} == {k: list(v) for k, v in bank.seen_.items()}
    assert [s.key for s in resumed.draw(7, 4)] == [s.key for s in bank.draw(7, 4)]
