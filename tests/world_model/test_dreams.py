"""Starts dreamt by the world model: on the policy's own paths, kept between dreams, and back after a resume."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sim.dreams import Dreams, DreamtStarts
from tests.world_model.toy_world import ToyPolicy, make_trace
from vla_wmrl.config import GroupsConfig, TrainConfig
from vla_wmrl.types import Start

LOOKS = 3


@pytest.fixture
def make_dreamer(make_model, tasks):
    model = make_model()
    asked: list = []

    def submit(what, starts):
        asked.append((what, list(starts)))
        done: Future = Future()
        done.set_result(what(model, ToyPolicy(), starts))
        return done

    def make() -> DreamtStarts:
        cfg = TrainConfig(
            groups=GroupsConfig(dream_resets=4, dream_episodes=2, dream_every=2, dream_looks=LOOKS, start_episodes=3)
        )
        cfg.env.task_ids = sorted(tasks)
        dreamer = DreamtStarts(cfg, SimpleNamespace(submit=submit), None, {t: len(s.goal) for t, s in tasks.items()})
        dreamer.initial = {t: np.stack([make_trace(s, i).states[0] for i in range(4)]) for t, s in tasks.items()}
        return dreamer

    return make, asked


def test_a_dream_is_cut_into_a_start_for_every_look_with_the_action_that_led_there(make_model, policy, starts):
    model = make_model()
    dreams = Dreams(LOOKS, (1,))(model, policy, starts)
    assert max(len(d.starts) for d in dreams) > 1
    for dream, start in zip(dreams, starts, strict=True):
        (whole,) = model.imagine(policy, [start], [0], (1,), LOOKS, stochastic=False)
        assert [s.look for s in dream.starts] == list(range(whole.looks)) and len(dream.progress) == whole.looks + 1
        for k, cut in enumerate(dream.starts):
            assert cut.snapshot is None and cut.task_id == start.task_id
            np.testing.assert_allclose(cut.state, whole.states[k], atol=1e-5)
        executed = whole.chain[:, -1].clip(-1, 1)[:, policy.n_action_steps - 1]
        led_there = np.reshape([s.previous for s in dream.starts[1:]], (-1, 7))
        np.testing.assert_allclose(led_there, executed[: whole.looks - 1], atol=1e-5)


def test_the_setting_that_turns_the_dynamics_noise_off_reaches_groups_and_dreams(make_model, policy, starts):
    from sim.imagine import Groups
    from vla_wmrl.config import GroupsConfig

    model = make_model()
    with torch.no_grad():
        model.net.robot_out.bias[8] = 3.0
    for one, states in (
        (lambda noisy: Dreams(2, (1,), noisy), lambda found: found[0].starts[-1].state),
        (lambda noisy: Groups(2, (1,), GroupsConfig(kind="episode", looks=2), noisy), lambda found: found[0][0].states[-1]),
    ):
        still, shaken, again = (states(one(noisy)(model, policy, starts[:1])) for noisy in (False, True, False))
        np.testing.assert_array_equal(still, again)
        assert not np.allclose(still, shaken)


def test_an_imagined_rollout_from_a_dreamt_start_goes_on_as_the_dream_did(make_model, policy, starts):
    """Otherwise state, action history or goal of the cut were lost."""
    model = make_model()
    (whole,) = model.imagine(policy, starts[:1], [0], (1,), LOOKS, stochastic=False, noisy=False)
    cut = Start(**{**starts[0].__dict__, "state": whole.states[1], "previous": whole.previous[1], "look": 1})
    scene_free = model.imagine(policy, [cut], [0], (1,), 1, stochastic=False, noisy=False)[0]
    same_noise = np.array_equal(scene_free.chain[0, 0], whole.chain[1, 0])
    assert not same_noise, "looks of other starts have keys of their own"
    np.testing.assert_allclose(scene_free.inputs["features"][0], whole.inputs["features"][1], atol=1e-4)
    np.testing.assert_allclose(scene_free.inputs["state"][0], whole.inputs["state"][1], atol=1e-4)


def test_starts_are_dreamt_anew_by_the_policy_of_then_and_kept_in_between(make_dreamer):
    make, asked = make_dreamer
    dreamer = make()
    first = dreamer.draw(0, 8)
    assert len(asked) == 1 and {s.look for s in first} <= set(range(LOOKS)) and {s.task_id for s in first} == {0, 3}
    assert len(asked[0][1]) == 2 * 2 and {s.init_id for s in asked[0][1]} <= {3, 4, 5, 6}, "played states come last"
    dreamer.draw(1, 8)
    assert len(asked) == 1
    dreamer.draw(2, 8)
    assert len(asked) == 2 and asked[0][0].seed != asked[1][0].seed
    assert set(dreamer.metrics) == {"dream/success", "dream/progress"} and dreamer.steps > 0


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(make_dreamer):
    make, asked = make_dreamer
    straight = make()
    straight.draw(0, 4)
    resumed = make()
    resumed.initial = {}
    resumed.load_state_dict(straight.state_dict())
    assert [s.key for s in resumed.draw(1, 6)] == [s.key for s in straight.draw(1, 6)]
    for a, b in zip(resumed.draw(1, 6), straight.draw(1, 6), strict=True):
        np.testing.assert_array_equal(a.state, b.state)
    assert len(asked) == 1 and [s.key for s in resumed.draw(2, 6)] == [s.key for s in straight.draw(2, 6)]
