import pytest
import torch

from vla_wmrl.grpo import (
    RatioMismatch,
    check_first_ratio,
    clipped_objective,
    grpo_loss,
    kl_estimate,
    log_ratio,
    look_weights,
    merge_metrics,
)

torch.set_num_threads(1)


def batch(seed=0, n=64, rollouts=8, spread=0.3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g, dtype=torch.float64)
    theta = torch.randn(5, generator=g, dtype=torch.float64).requires_grad_()
    old = (x @ theta).detach() + spread * torch.randn(n, generator=g, dtype=torch.float64)
    rollout = torch.randint(0, rollouts, (n,), generator=g)
    mask = torch.rand(n, generator=g) < 0.8
    advantages = torch.randn(rollouts, generator=g, dtype=torch.float64)[rollout]
    return x, theta, old, rollout, mask, advantages


def gradient(theta, loss):
    (grad,) = torch.autograd.grad(loss, theta)
    return grad


@pytest.mark.parametrize("parts", [1, 8, 64])
def test_accumulation_over_minibatches_equals_the_whole_batch(parts):
    x, theta, old, rollout, mask, advantages = batch()
    weights = look_weights(rollout, mask)
    ref = old + 0.1
    whole, whole_metrics = grpo_loss(x @ theta, old, advantages, weights, logp_ref=ref, kl_coef=0.04)
    expected = gradient(theta, whole)
    total, metrics = torch.zeros(5, dtype=torch.float64), []
    for rows in torch.randperm(64, generator=torch.Generator().manual_seed(1)).chunk(parts):
        loss, m = grpo_loss(x[rows] @ theta, old[rows], advantages[rows], weights[rows], logp_ref=ref[rows], kl_coef=0.04)
        total += gradient(theta, loss)
        metrics.append(m)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-13)
    merged = merge_metrics(metrics)
    assert merged == pytest.approx(whole_metrics, rel=1e-9, abs=1e-12)
    assert whole_metrics["weight"] == pytest.approx(1.0)


def test_masked_rows_change_nothing_even_when_they_hold_nan():
    x, theta, old, rollout, _, advantages = batch()
    mask = torch.ones(64, dtype=torch.bool)
    loss, metrics = grpo_loss(x @ theta, old, advantages, look_weights(rollout, mask), logp_ref=old, kl_coef=0.1)
    expected = gradient(theta, loss)
    nan = torch.full((6,), float("nan"), dtype=torch.float64)
    # Masked looks of rollouts that are there, and a rollout (99) that is masked altogether.
    rollout2 = torch.cat([rollout, torch.tensor([0, 1, 1, 99, 99, 99])])
    weights = look_weights(rollout2, torch.cat([mask, torch.zeros(6, dtype=torch.bool)]))
    loss2, metrics2 = grpo_loss(
        torch.cat([x @ theta, nan]),
        torch.cat([old, nan]),
        torch.cat([advantages, nan]),
        weights,
        logp_ref=torch.cat([old, nan]),
        kl_coef=0.1,
    )
    torch.testing.assert_close(loss2, loss)
    torch.testing.assert_close(gradient(theta, loss2), expected)
    assert metrics2 == pytest.approx(metrics)


def test_every_rollout_weighs_the_same_however_long():
    rollout = torch.tensor([7] * 1 + [3] * 10 + [5] * 4)
    mask = torch.ones(15, dtype=torch.bool)
    mask[[2, 13]] = False
    weights = look_weights(rollout, mask)
    for r in (7, 3, 5):
        assert weights[rollout == r].sum().item() == pytest.approx(1 / 3)
    assert weights[2] == 0 and weights[13] == 0
    assert weights[rollout == 3].max() == pytest.approx(1 / 27)


def test_duplicating_looks_of_a_failed_episode_leaves_its_weight():
    x, theta, old, rollout, _, advantages = batch(spread=0.0)
    ones = torch.ones(64, dtype=torch.bool)
    loss, _ = grpo_loss(x @ theta, old, advantages, look_weights(rollout, ones))
    rows = torch.cat([torch.arange(64), torch.where(rollout == 2)[0]])
    loss2, _ = grpo_loss(
        (x @ theta)[rows], old[rows], advantages[rows], look_weights(rollout[rows], ones[:1].expand(len(rows)))
    )
    torch.testing.assert_close(gradient(theta, loss), gradient(theta, loss2))


def test_explicit_rollout_count_is_used():
    weights = look_weights(torch.tensor([0, 1, 2, 2]), torch.ones(4, dtype=torch.bool), n_rollouts=2)
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.5, 0.25, 0.25], dtype=torch.float64))


def test_gradient_at_ratio_one_is_the_policy_gradient():
    x, theta, _, rollout, mask, advantages = batch()
    logp, weights = x @ theta, look_weights(rollout, mask)
    loss, metrics = grpo_loss(logp, logp.detach(), advantages, weights)
    torch.testing.assert_close(gradient(theta, loss), -(weights * advantages) @ x)
    assert metrics["clip_frac"] == 0 and metrics["approx_kl"] == 0 and metrics["ratio_mean"] == pytest.approx(1.0)


def test_loss_gradient_matches_finite_differences():
    x, theta, old, rollout, mask, advantages = batch(spread=0.05)
    weights = look_weights(rollout, mask)

    def f(t):
        return grpo_loss(x @ t, old, advantages, weights, logp_ref=old - 0.2, kl_coef=0.3, kl_kind="k3")[0]

    assert torch.autograd.gradcheck(f, theta)


def test_clip_is_two_sided_and_only_stops_steps_that_go_on():
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.25, 1.5, 1.5])
    advantage = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, -1.0])
    expected = torch.tensor([0.5, -0.8, 1.0, 1.25, 1.28, -1.5])
    torch.testing.assert_close(clipped_objective(ratio, advantage, 0.2, 0.28), expected)


def test_dual_clip_bounds_a_runaway_ratio_for_negative_advantages_only():
    ratio, advantage = torch.tensor([10.0, 10.0]), torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(clipped_objective(ratio, advantage, 0.2, 0.28, dual_clip=3.0), torch.tensor([-3.0, 1.28]))
    with pytest.raises(ValueError, match="dual_clip"):
        clipped_objective(ratio, advantage, dual_clip=0.5)


def test_clip_frac_counts_binding_clips_by_weight():
    log_ratios = torch.tensor([1.0, -1.0, 1.0, -1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])  # binding: the first and the last
    _, metrics = grpo_loss(log_ratios, torch.zeros(4), advantages, torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert metrics["clip_frac"] == pytest.approx(0.5)
    assert metrics["ratio_max"] == pytest.approx(2.718281828)
    assert metrics["approx_kl"] == pytest.approx(0.6 * (2.718281828 - 2) + 0.4 * 0.3678794412)  # k3 of old from new
    assert metrics["log_ratio_abs_max"] == 1.0


def test_kl_is_added_to_the_loss_with_its_sign():
    logp, zero = torch.tensor([0.5]), torch.zeros(1)
    loss, metrics = grpo_loss(logp, logp, zero, torch.ones(1), logp_ref=zero, kl_coef=2.0, kl_kind="k1")
    assert loss.item() == pytest.approx(1.0) and metrics["kl_ref"] == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimators_are_unbiased(kind):
    g = torch.Generator().manual_seed(0)
    p, q = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.4, 1.3)
    x = torch.randn(400_000, generator=g)
    estimate = kl_estimate(p.log_prob(x), q.log_prob(x), kind).mean().item()
    assert estimate == pytest.approx(torch.distributions.kl_divergence(p, q).item(), rel=0.02)


def test_k2_gradient_is_that_of_the_reverse_kl():
    g = torch.Generator().manual_seed(0)
    mean = torch.tensor(0.3, requires_grad=True)
    x = mean.detach() + torch.randn(400_000, generator=g)
    logp = torch.distributions.Normal(mean, 1.0).log_prob(x)
    logp_ref = torch.distributions.Normal(0.0, 1.0).log_prob(x)
    (grad,) = torch.autograd.grad(kl_estimate(logp, logp_ref, "k2").mean(), mean)
    assert grad.item() == pytest.approx(0.3, abs=0.01)


def test_k3_is_never_negative_and_unknown_kind_is_refused():
    x = torch.randn(100)
    assert (kl_estimate(x, torch.zeros(100), "k3") >= 0).all()
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(x, x, "k4")


def test_first_ratio_check_raises_on_mismatch_and_on_nan():
    assert check_first_ratio(torch.tensor([0.0, 5e-6])) == pytest.approx(5e-6)
    for bad in (2e-5, -2e-5, float("nan"), float("inf")):
        with pytest.raises(RatioMismatch, match="log ratio"):
            check_first_ratio(torch.tensor([0.0, bad]))


def test_first_ratio_check_ignores_masked_rows():
    assert check_first_ratio(torch.tensor([0.0, float("nan")]), torch.tensor([True, False])) == 0.0


def test_ratios_are_float32_and_old_log_probs_carry_no_gradient():
    new, old = (torch.zeros(2, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    ratio = log_ratio(new, old)
    assert ratio.dtype == torch.float32
    ratio.sum().backward()
    assert old.grad is None and new.grad is not None


def test_runaway_ratio_stays_finite():
    loss, _ = grpo_loss(torch.tensor([500.0]), torch.zeros(1), torch.tensor([-1.0]), torch.ones(1))
    assert torch.isfinite(loss)
