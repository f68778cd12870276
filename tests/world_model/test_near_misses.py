"""Near misses: keyed, from training states only, and really replays."""

from dataclasses import dataclass

import numpy as np
import pytest

from sim.libero import EnvSpec, LiberoEnv
from sim.near_misses import (
    GRASP,
    RELEASE,
    STEPS,
    Moment,
    NearMissJob,
    load_segments,
    moments,
    perturb,
    replay,
    save_segments,
)
from vla_wmrl.errors import UserError
from vla_wmrl.policies.noise import generator
from vla_wmrl.types import Start

SPEC = EnvSpec(task_id=0, image_size=0, stepping="fast")


def test_official_states_are_refused():
    with pytest.raises(UserError, match="training"):
        NearMissJob(SPEC, (0,), seed=0, split="official")


def commands(*runs):
    actions = np.zeros((sum(n for _, n in runs), 7), dtype=np.float32)
    actions[:, 6] = np.concatenate([np.full(n, sign) for sign, n in runs])
    return actions


def test_moments_lie_before_an_event_with_no_other_in_between():
    actions = commands((-1, 40), (1, 30), (-1, 3), (1, 2), (-1, 20))
    found = moments(list(range(len(actions))), actions, np.random.default_rng(0), 2)
    for m in found:
        assert m.kind in (GRASP, RELEASE) and m.step + m.event in (40, 70) and m.snapshot == m.step
        assert len(set(m.actions[: m.event, 6].tolist())) == 1
        assert (m.actions[m.event, 6] > 0) == (m.kind == GRASP)
    assert {m.kind for m in found} == {GRASP, RELEASE}


def test_a_command_that_flickers_makes_no_moment():
    actions = commands(*[(sign, 2) for _ in range(10) for sign in (-1, 1)])
    assert moments(list(range(len(actions))), actions, np.random.default_rng(0), 2) == []


def test_perturbations_are_keyed_and_differ():
    moment = Moment(None, np.zeros(7), commands((-1, 15), (1, STEPS - 15)), GRASP, 15, 3)
    a, b, c = (perturb(moment, generator(key)) for key in ((1, 2), (1, 2), (1, 3)))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c) and a.shape == (STEPS, 7) and a.dtype == np.float32 and np.abs(a).max() <= 1


@dataclass
class Kept:
    worker: int = 0

    def keep(self, key, build):
        return build()


@pytest.mark.sim
def test_a_replay_repeats_and_starts_from_its_snapshot(tmp_path):
    from sim.near_misses import Segment
    from sim.rollout import begin
    from sim.state import read_state

    env = LiberoEnv(SPEC)
    begin(env, Start(0, 3))
    for _ in range(3):
        env.step(np.array([0.2, 0, -0.5, 0, 0, 0, -1]))
    snapshot, state = env.snapshot(), read_state(env)
    actions = perturb(Moment(snapshot, np.zeros(7), commands((-1, 10), (1, STEPS - 10)), GRASP, 10, 3), generator((4,)))[:12]
    one = replay(env, snapshot, np.zeros(7), actions, 3)
    two = replay(env, snapshot, np.zeros(7), actions, 3)
    np.testing.assert_array_equal(one.states, two.states)
    np.testing.assert_allclose(one.states[0], state, atol=2e-3)  # restoring derives poses one substep later
    save_segments(tmp_path / "s.npz", [Segment(one, (0, 3, 0, 3), GRASP, 10)])
    (back,) = load_segments(tmp_path / "s.npz")
    assert back.group == (0, 3, 0, 3) and back.kind == GRASP
    np.testing.assert_array_equal(back.trace.states, one.states)
    env.close()


def test_pressing_goes_down_until_the_hand_has_closed_and_changes_nothing_else():
    moment = Moment(None, np.zeros(7), commands((-1, 15), (1, STEPS - 15)), GRASP, 15, 3)
    pressed = [(perturb(moment, generator((i,))), perturb(moment, generator((i,)), press=0.4)) for i in range(20)]
    lower = [a[:, 2] - b[:, 2] for a, b in pressed]
    assert any((d > 0.05).any() for d in lower) and any((d == 0).all() for d in lower)
    for (a, b), d in zip(pressed, lower, strict=True):
        assert (d >= 0).all() and (d <= 0.4 + 1e-6).all() and not d[23:].any()
        np.testing.assert_array_equal(np.delete(a, 2, axis=1), np.delete(b, 2, axis=1))


@pytest.mark.sim
def test_near_misses_of_a_recorded_episode_start_on_its_path():
    from sim.near_misses import near_misses, replay
    from sim.rollout import begin

    env = LiberoEnv(SPEC)
    begin(env, Start(0, 5))
    actions = commands((-1, 30), (1, 30))
    actions[:30, 2], actions[:, 0] = -0.3, 0.1
    path = replay(env, env.snapshot(), np.zeros(7), actions, 5)
    job = NearMissJob(SPEC, (5,), 0, {5: actions}, moments_per_event=2, per_moment=2, displace_m=0.0, press=0.4)
    segments = near_misses(env, job, 5)
    assert len(segments) == 4
    for s in segments:
        step = s.group[-1]
        np.testing.assert_allclose(s.trace.states[0], path.states[step], atol=2e-3)
        np.testing.assert_array_equal(s.trace.previous, actions[step - 1])
    env.close()
