"""The Flow-SDE step itself, on distributions whose answer is known."""

import math

import pytest
import torch

from vla_wmrl.policies.flow import gaussian_log_prob, sde_transition

MEAN, STD = 0.3, 0.2  # the target of the one-dimensional check in vla-landscape 5.1


def exact_velocity(x, t):
    """E[eps - a | x_t = x] for a ~ N(MEAN, STD^2), eps ~ N(0, 1)."""
    variance = t**2 + (1 - t) ** 2 * STD**2
    centred = x - (1 - t) * MEAN
    return t / variance * centred - MEAN - (1 - t) * STD**2 / variance * centred


def run(n, eta, rows=200_000):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, generator=generator, dtype=torch.float64)
    for k in range(n):
        t = torch.tensor(1.0 - k / n, dtype=torch.float64)
        mean, std = sde_transition(x, exact_velocity(x, t), t, 1.0 / n, eta)
        x = mean + std * torch.randn(rows, generator=generator, dtype=torch.float64)
    return x


@pytest.mark.parametrize(
    ("n", "ode", "sde", "tolerance"), [(10, 0.154, 0.174, 3e-2), (50, 0.190, 0.195, 7e-3), (200, 0.198, 0.199, 2e-3)]
)
def test_sde_keeps_the_marginal_of_the_target(n, ode, sde, tolerance):
    for eta, known in ((0.0, ode), (0.5, sde)):
        x = run(n, eta)
        assert x.std().item() == pytest.approx(known, abs=2e-3)
        assert x.mean().item() == pytest.approx(MEAN, abs=4e-3)
    assert x.std().item() == pytest.approx(STD, abs=tolerance)  # of the SDE


def test_noise_level_at_every_step_is_the_published_one():
    known = [0.500, 0.474, 0.316, 0.242, 0.194, 0.158, 0.129, 0.104, 0.079, 0.053]
    for k, value in enumerate(known):
        _, std = sde_transition(torch.zeros(1), torch.zeros(1), torch.tensor(1.0 - k / 10), 0.1, 0.5)
        assert std.item() == pytest.approx(value, abs=6e-4)


def test_mean_agrees_with_the_interpolant_form():
    """mean = x0 (1 - (t - d)) + x1 (t - d - sigma^2 d / (2 t)), x0 = x - v t, x1 = x + v (1 - t) (RLinf)."""
    x, v = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    for k in range(10):
        t, d, eta = torch.tensor(1.0 - k / 10, dtype=torch.float64), 0.1, 0.7
        mean, std = sde_transition(x, v, t, d, eta)
        sigma = std / math.sqrt(d)
        other = (x - v * t) * (1 - (t - d)) + (x + v * (1 - t)) * (t - d - sigma**2 * d / (2 * t))
        assert torch.allclose(mean, other, atol=1e-12)


def test_log_density_is_that_of_the_normal_distribution():
    y, mean, std = torch.randn(20), torch.randn(20), torch.rand(20) + 0.05
    assert torch.allclose(gaussian_log_prob(y, mean, std), torch.distributions.Normal(mean, std).log_prob(y), atol=1e-5)


def test_zero_std_gives_log_prob_zero_and_no_nan_gradient():
    mean = torch.zeros(3, requires_grad=True)
    value = gaussian_log_prob(torch.ones(3), mean, torch.zeros(3))
    value.sum().backward()
    assert torch.equal(value, torch.zeros(3)) and torch.equal(mean.grad, torch.zeros(3))
