"""Smooth exploration: what it reaches, what it scores, and what it leaves to the deterministic sampler."""

import numpy as np
import pytest
import torch

from vla_wmrl.errors import UserError
from vla_wmrl.policies.base import NO_SDE_STEP
from vla_wmrl.policies.exploration import SmoothNoise, designed_noise, smooth_basis
from vla_wmrl.policies.noise import SDE, noise

SCALE = (1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 3.0)


def executed(rows, horizon=16, run=8):
    mask = torch.zeros(rows, horizon, dtype=torch.bool)
    mask[:, :run] = True
    return mask


def test_components_are_orthogonal_over_the_executed_steps_and_absent_after():
    basis = smooth_basis(3, 8, 16)
    assert torch.allclose(basis @ basis.T, 8 * torch.eye(3), atol=1e-5)
    assert basis[:, 8:].abs().max() == 0


def test_coordinates_invert_spread_and_leave_unexplored_dimensions_alone():
    noise = SmoothNoise(2, 8, 16, SCALE, padded_dim=9)
    w = torch.randn(5, *noise.shape)
    spread = noise.spread(w)
    assert torch.allclose(noise.coordinates(spread), w, atol=1e-5)
    assert spread[..., [3, 4, 5, 7, 8]].abs().max() == 0
    assert torch.allclose(noise.spread(torch.ones(1, *noise.shape))[0, :8, 6].square().mean(), torch.tensor(2 * 9.0))


def test_a_group_explores_in_opposite_pairs_at_right_angles_and_other_groups_differ():
    group = np.stack([designed_noise((3, 1, member), (1, 4)).ravel() for member in range(16)])
    assert np.array_equal(group[::2], -group[1::2])
    for block in (group[:8:2], group[8::2]):
        gram = block @ block.T
        assert np.allclose(gram - np.diag(np.diag(gram)), 0, atol=1e-5)
    assert not np.allclose(group[:8], group[8:])
    assert not np.allclose(group[0], designed_noise((3, 2, 0), (1, 4)).ravel())


def test_every_member_of_a_designed_group_is_standard_normal_on_its_own():
    for member in (0, 5):
        draws = np.stack([designed_noise((i, member), (2, 2)).ravel() for i in range(4000)]).astype(np.float64)
        assert np.allclose(draws.mean(0), 0, atol=0.06)
        assert np.allclose(np.cov(draws.T), np.eye(4), atol=0.08)
        assert abs((draws**4).mean() - 3) < 0.2  # lengths vary as a normal vector's do


def test_a_designed_group_tells_directions_apart_where_independent_draws_mix_them_up():
    """Mean loss of cosine between a linear reward's slope and the advantage-weighted noise of a group of 10 in 5 dims."""
    rng, off = np.random.default_rng(0), {}
    for name, draw in {"designed": designed_noise, "independent": lambda key, shape: noise(key, shape, SDE)}.items():
        lost = []
        for group in range(100):
            w = np.stack([draw((group, member), (1, 5)).ravel() for member in range(10)])
            slope = rng.standard_normal(5)
            reward = w @ slope
            found = (reward - reward.mean()) @ w
            lost.append(1 - found @ slope / np.linalg.norm(found) / np.linalg.norm(slope))
        off[name] = np.mean(lost)
    assert off["designed"] < 0.6 * off["independent"]


def test_smooth_noise_moves_the_deterministic_chunk_of_the_same_key_only_by_its_components(make_flow, observation, keys):
    flow = make_flow(eta=0.2, sde="smooth", components=2, scale=SCALE)
    inputs = flow.encode(*observation(4))
    still, moved = flow.sample(inputs, keys(4), False), flow.sample(inputs, keys(4), True)
    difference = (moved.chain - still.chain)[:, -1]
    assert torch.allclose(moved.chain[:, :-1], still.chain[:, :-1], atol=1e-5)
    w = flow.smooth.coordinates(difference)
    assert torch.allclose(flow.smooth.spread(w), difference, atol=1e-5) and w.abs().min() > 1e-5


def test_smooth_log_prob_is_the_gaussian_of_its_coordinates(make_flow, observation, keys):
    flow = make_flow(eta=0.2, sde="smooth", scale=SCALE)
    inputs = flow.encode(*observation(4))
    still, moved = flow.sample(inputs, keys(4), False), flow.sample(inputs, keys(4), True)
    w = flow.smooth.coordinates((moved.chain - still.chain)[:, -1])
    expected = torch.distributions.Normal(0.0, 0.2).log_prob(w).sum(dim=(1, 2))
    mask = executed(4)
    mask[2] = False
    found = flow.log_prob(inputs, moved.chain, moved.sde_step, mask)
    assert torch.allclose(found, torch.where(mask.any(1), expected, 0.0), atol=1e-3)
    found.sum().backward()
    assert sum(float(p.grad.abs().sum()) for _, p in flow.parameters_to_train() if p.grad is not None) > 0


def test_rows_that_do_not_explore_run_the_deterministic_sampler_and_are_not_scored(make_flow, observation, keys):
    flow = make_flow(eta=0.2, sde="smooth", scale=SCALE)
    inputs = flow.encode(*observation(4))
    mixed, still = flow.sample(inputs, keys(4), [True, False, True, False]), flow.sample(inputs, keys(4), False)
    assert mixed.sde_step.tolist() == [3, NO_SDE_STEP, 3, NO_SDE_STEP]
    assert torch.allclose(mixed.chain[1::2], still.chain[1::2], atol=1e-5)
    assert (mixed.chain[::2] - still.chain[::2])[:, -1].abs().amax(dim=(1, 2)).min() > 1e-3
    value = flow.log_prob(inputs, mixed.chain, mixed.sde_step, executed(4))
    assert torch.equal(value[1::2], torch.zeros(2)) and value[::2].abs().min() > 0


@pytest.mark.parametrize("sde", ["smooth", "hybrid", "all"])
def test_members_of_a_group_share_the_initial_noise_and_nothing_else(make_flow, observation, sde):
    flow = make_flow(eta=0.5, sde=sde)
    images, state, task = observation(1)
    inputs = flow.encode({k: v.repeat(3, 1, 1, 1) for k, v in images.items()}, state.repeat(3, 1), task * 3)
    chain = flow.sample(inputs, [(7, 0, 2, member) for member in range(3)], True).chain.numpy()
    np.testing.assert_array_equal(chain[0, 0], chain[1, 0])
    assert abs(chain[0, -1] - chain[1, -1]).max() > 1e-3 and abs(chain[1, -1] - chain[2, -1]).max() > 1e-3


@pytest.mark.parametrize(("settings", "message"), [({"components": 9}, "between 1 and the 8"), ({"scale": (1.0,)}, "7 action")])
def test_noise_that_does_not_fit_the_policy_is_refused(make_flow, settings, message):
    with pytest.raises(UserError, match=message):
        make_flow(sde="smooth", **settings)


def test_smooth_gradient_is_that_of_the_whole_chunk_not_of_its_last_denoising_step(make_flow, observation, keys):
    """Finite differences of the log-prob along the gradient, the chunk being integrated anew from its initial noise."""
    flow = make_flow(eta=0.2, sde="smooth", scale=SCALE)
    inputs = flow.encode(*observation(3))
    sample = flow.sample(inputs, keys(3), True)
    value = flow.log_prob(inputs, sample.chain, sample.sde_step, executed(3)).sum()
    parameters = [p for _, p in flow.parameters_to_train()]
    grads = torch.autograd.grad(value, parameters, allow_unused=True)
    norm = sum(float(g.square().sum()) for g in grads if g is not None)
    with torch.no_grad():
        step = 1e-3 / norm**0.5
        for p, g in zip(parameters, grads, strict=True):
            p.add_(0 if g is None else step * g)
        mean = flow.sample(inputs, keys(3), False).chain[:, -1]
        w = flow.smooth.coordinates(sample.chain[:, -1] - mean)
        after = torch.distributions.Normal(0.0, 0.2).log_prob(w).sum()
    assert float(after - value) == pytest.approx(step * norm, rel=0.1)


def test_members_that_share_a_look_are_scored_as_if_each_were_alone(make_flow, observation):
    """The network runs once for them; values and gradients are those of separate rows."""
    flow = make_flow(eta=0.2, sde="smooth", scale=SCALE)
    images, state, task = observation(2)
    pairs = torch.tensor([0, 0, 0, 1, 1, 0])
    inputs = {k: v[pairs] for k, v in flow.encode(images, state, task).items()}
    sample = flow.sample(inputs, [(int(k), member) for member, k in enumerate(pairs)], True)
    calls = []
    integrate, flow.integrate = flow.integrate, lambda *a: calls.append(len(a[1])) or integrate(*a)
    together = flow.log_prob(inputs, sample.chain, sample.sde_step, executed(6))
    assert calls == [3]
    alone = torch.cat([flow.log_prob({k: v[i : i + 1] for k, v in inputs.items()}, sample.chain[i : i + 1],
                                     sample.sde_step[i : i + 1], executed(1)) for i in range(6)])  # fmt: skip
    assert torch.allclose(together, alone, atol=1e-3)
    parameters = [p for _, p in flow.parameters_to_train()]
    for a, b in zip(*(torch.autograd.grad(v.sum(), parameters, allow_unused=True) for v in (together, alone)), strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(b.abs().max())))


def test_a_centre_moved_by_one_offset_of_the_noise_is_half_a_nat_away(make_flow, observation, keys):
    flow = make_flow(eta=0.2, sde="smooth", scale=SCALE)
    inputs = flow.encode(*observation(1))
    sample = flow.sample(inputs, keys(1), False)
    centre = flow.centre(inputs, sample.chain, sample.sde_step, executed(1))
    integrate = flow.integrate
    moved = torch.zeros(16, flow.padded_dim)
    moved[:8, 6] = 0.2 * 3.0
    flow.integrate = lambda *a: integrate(*a) + moved
    shifted = flow.centre(inputs, sample.chain, sample.sde_step, executed(1))
    assert float(0.5 * (shifted - centre).square().mean(1).sum()) == pytest.approx(0.5, rel=1e-3)
