"""Fitting: seeded, goes on from where it was, learns what moves, and copes with what is missing."""

import numpy as np
import pytest
import torch

from tests.world_model.toy_world import SMALL, make_trace
from vla_wmrl.errors import UserError
from vla_wmrl.world_model.latent import FitConfig, StateSpaceModel


def test_two_fits_of_one_seed_are_bit_equal(make_model):
    a, b = make_model(), make_model()
    for name, value in a.net.state_dict().items():
        assert torch.equal(value, b.net.state_dict()[name]), name


def test_a_resumed_fit_equals_an_uninterrupted_one(make_model, tasks):
    """A refit after a reload has the bits of one that never stopped."""
    straight, stopped = make_model(), make_model()
    straight.fit(3)
    resumed = StateSpaceModel(tasks, seed=0, width=16, config=SMALL)
    resumed.load_state_dict(stopped.state_dict(data=True))
    resumed.fit(3)
    for name, value in straight.net.state_dict().items():
        assert torch.equal(value, resumed.net.state_dict()[name]), name


def test_fitting_lowers_the_path_error(tasks):
    model = StateSpaceModel(tasks, width=16, config=FitConfig(stages=((1.0, 6, 16),)))
    model.observe([make_trace(tasks[0], i) for i in range(6)], "expert")
    before = model.fit(1)["hand"]
    model.fit(200)
    after = model.fit(1)["hand"]
    assert after < 0.7 * before


def test_a_refit_learns_from_branches_that_ended_early(make_model, tasks):
    """Branches end where they succeed: with the longest windows alone a refit saw failures only, or nothing at all."""
    model = make_model()
    assert SMALL.stages[-1][1] > 4
    model.corpus.items.clear()
    model.observe([make_trace(tasks[0], i, steps=4) for i in range(3)], "policy")
    before = {name: value.clone() for name, value in model.net.state_dict().items()}
    assert np.isfinite(list(model.fit(3).values())).all()
    assert any(not torch.equal(value, before[name]) for name, value in model.net.state_dict().items())


def test_a_first_fit_on_short_trajectories_uses_the_windows_they_have_and_none_at_all_is_a_clear_error(tasks):
    """A run of few control steps ended in a TypeError when the windows grew beyond its episodes."""
    model = StateSpaceModel(tasks, width=16, config=SMALL)
    with pytest.raises(UserError, match="no trajectory of"):
        model.fit(2)
    assert SMALL.stages[-1][1] > 4
    model.observe([make_trace(tasks[0], i, steps=4) for i in range(3)], "policy")
    assert np.isfinite(list(model.fit(6).values())).all()


def test_near_misses_get_their_share_of_a_batch(make_model):
    model = make_model(updates=0)
    rng = np.random.default_rng(0)
    share = model.corpus.share
    near = {i for i, item in enumerate(model.corpus.items) if item.kind == "near_miss"}
    windows = model.corpus._index("near", 4)[0]
    assert set(windows[:, 0].tolist()) == near
    assert model.corpus.sample(rng, 20, 4).robot.shape[0] == 20 and 0.6 <= share <= 0.75


def test_trajectories_without_progress_are_used_for_the_rest(tasks):
    from dataclasses import replace

    model = StateSpaceModel(tasks, width=16, config=SMALL)
    model.observe(
        [replace(t, progress=np.full_like(t.progress, np.nan)) for t in (make_trace(tasks[0], i) for i in range(3))],
        "expert",
    )
    assert all(np.isfinite(v) for v in model.fit(3).values())


def test_features_do_not_shift_under_fitted_weights(make_model, tasks):
    from dataclasses import replace

    model = make_model()
    before = dict(model.rest_)
    low = make_trace(tasks[0], 1)
    model.observe([replace(low, states=low.states - np.float32(0.2))], "policy")
    assert model.rest_ == before


def test_predicted_rotations_stay_orthonormal(make_model, tasks):
    model = make_model()
    trace = make_trace(tasks[0], 3)
    path, grades, log_p = model.predict(0, trace.states[:1], trace.actions[None], trace.previous[None])
    for rot6 in (path.robot[..., 3:9], path.bodies[..., 3:9]):
        x, y = rot6[..., :3], rot6[..., 3:]
        torch.testing.assert_close(x.norm(dim=-1), torch.ones_like(x[..., 0]))
        torch.testing.assert_close((x * y).sum(-1), torch.zeros_like(x[..., 0]), atol=1e-5, rtol=0)
    assert log_p.shape == (1, 20) and (log_p <= 0).all() and grades.held.shape == (1, 20, 2)


def test_fitting_the_heads_leaves_the_dynamics_alone(make_model):
    model = make_model()
    before = {name: value.clone() for name, value in model.net.state_dict().items()}
    model.fit_grades(3)
    changed = {name for name, value in model.net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("grade_") for name in changed)


def test_a_few_contacts_that_go_wrong_do_not_shake_a_hand_that_moves_freely(make_model):
    """By a Gaussian likelihood they set the scale, and imagined twins were twice as far apart as the model's own error."""
    from types import SimpleNamespace

    from vla_wmrl.world_model.dynamics import NOISE_SCALE, Scene

    model, rng = make_model(updates=0), np.random.default_rng(0)
    steps = torch.from_numpy(rng.normal(0, 2e-4, (2000, 1, 3))).float()
    steps[:40] *= 100
    real_robot, real_bodies = torch.zeros(2000, 2, 16), torch.zeros(2000, 2, 1, 15)
    path = Scene(torch.cat([steps, torch.zeros(2000, 1, 13)], -1), real_bodies[:, 1:])
    w = SimpleNamespace(robot=real_robot, bodies=real_bodies, context=SimpleNamespace(present=torch.ones(2000, 1)))
    still = torch.zeros(2000, 3)

    def best(jitter):
        scales = torch.linspace(-5, 1, 121)
        losses = [model._noise_loss(path, torch.full((2000, 1, 2), float(s)), w, jitter) for s in scales]
        losses = [float(a) - float(s) / 2 for a, s in zip(losses, scales, strict=True)]  # the body's half: error 0
        return NOISE_SCALE * float(torch.exp(scales[int(np.argmin(losses))]))

    assert 1e-4 < best(still) < 1e-3  # a Gaussian's would be 2.8 mm
    assert best(steps[:, 0]) < 3e-5  # an error that was there before the step is none of the step's


def test_a_can_that_lies_when_a_near_miss_begins_does_not_lower_what_counts_as_lifted(tasks):
    """Near misses of a policy's fumbles begin with cans on their side, a centimetre lower: standing ones counted as lifted."""
    from dataclasses import replace

    model = StateSpaceModel(tasks, width=16, config=SMALL)
    episode = make_trace(tasks[0], 0)
    model.observe([episode], "expert")
    before = dict(model.rest_)
    low = episode.states.copy()
    for name in model.scenes.names[episode.task_id]:
        low[:, tasks[episode.task_id].layout[f"{name}/pos"][0] + 2] -= 0.01
    model.observe([replace(episode, states=low)], "near_miss")
    assert model.rest_ == before
    model.observe([replace(episode, states=low)], "policy")
    assert all(model.rest_[key] < before[key] for key in before)


def test_the_first_step_of_an_episode_is_drawn_more_often_than_those_after_it(make_model):
    """A hand that sets off from rest was 2 mm off in its first control step, in every episode and every dream."""
    model = make_model(updates=0)
    picks, cumulative = model.corpus._index("other", 4)
    share = np.diff(cumulative, prepend=0.0)
    assert share[picks[:, 1] == 0].min() > 3 * share[picks[:, 1] > 0].max()


def test_a_hand_that_is_stuck_is_not_a_hand_at_rest(tasks):
    """Fingers on a rim move nothing, so such windows were hardly drawn; in imagination the hand crept down and grasped."""
    from dataclasses import replace

    model = StateSpaceModel(tasks, width=16, config=SMALL)
    trace = make_trace(tasks[0], 0)
    model.observe([trace], "policy")
    still = replace(trace, states=np.repeat(trace.states[:1], len(trace.states), axis=0))
    pushing, resting = np.zeros_like(trace.actions), np.zeros_like(trace.actions)
    pushing[:, 2] = -0.5
    stuck, rest = (model.corpus._item(replace(still, actions=a), "policy").weight for a in (pushing, resting))
    assert stuck.min() > 5 * rest.max()
