import numpy as np
import pytest

from vla_wmrl import stats


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(23, 25, 0.750, 0.978), (458, 500, 0.888, 0.937), (0, 10, 0.0, 0.278), (0, 0, 0.0, 1.0)],
)
def test_wilson_matches_published_values(successes, n, low, high):
    assert stats.wilson(successes, n) == pytest.approx((low, high), abs=6e-4)


def test_wilson_width_follows_z():
    centre, half = (0.92 + 0.5 / 25) / (1 + 1 / 25), np.sqrt(0.92 * 0.08 / 25 + 0.25 / 25**2) / (1 + 1 / 25)
    assert stats.wilson(23, 25, z=1.0) == pytest.approx((centre - half, centre + half))


def test_mcnemar_is_exact_and_uses_discordant_pairs_only():
    a = np.array([1] * 8 + [0] * 1 + [1] * 50 + [0] * 41, bool)
    b = np.array([0] * 8 + [1] * 1 + [1] * 50 + [0] * 41, bool)
    assert stats.mcnemar(a, b) == pytest.approx(2 * (1 + 9) / 2**9)
    assert stats.mcnemar(a, a) == 1.0


def test_paired_difference_has_the_sign_of_b_minus_a_and_covers_it():
    rng = np.random.default_rng(0)
    task = np.repeat(np.arange(10), 40)
    a, b = rng.random(400) < 0.4, rng.random(400) < 0.6
    d = stats.paired_difference(a, b, task)
    assert d.value == pytest.approx(b.mean() - a.mean())
    assert 0.05 < d.low < d.value < d.high < 0.35


def test_paired_difference_between_tasks_is_not_hidden_by_many_episodes():
    task = np.repeat(np.arange(6), 200)
    a, b = np.zeros(1200), np.repeat([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], 200)
    clustered = stats.paired_difference(a, b, task)
    within = stats.paired_difference(a, b, task, resample="episodes")
    assert clustered.high - clustered.low > 1.0  # six tasks that disagree say little about a seventh
    assert within.high == within.low == 0.0  # but about these six it is known exactly


def test_paired_difference_of_unequal_tasks_is_a_mean_of_episodes():
    d = stats.paired_difference(np.zeros(121), np.ones(121), np.repeat([0, 1, 2], [1, 20, 100]))
    assert (d.low, d.value, d.high) == pytest.approx((1.0, 1.0, 1.0))


def test_paired_difference_within_tasks_agrees_with_the_normal_interval():
    rng = np.random.default_rng(1)
    delta = rng.normal(size=800)
    d = stats.paired_difference(np.zeros(800), delta, np.repeat([3, 7], 400), resample="episodes")
    assert d.se == pytest.approx(1 / np.sqrt(800), rel=0.1)


def test_within_group_auc_ignores_differences_between_starts():
    groups = np.repeat([0, 1], 4)
    outcome = np.array([1, 1, 1, 0, 1, 0, 0, 0])
    scores = np.array([5, 5, 5, 5, 1, 1, 1, 1.0])  # tells the easy start from the hard one, nothing inside
    assert stats.auc(scores, outcome) > 0.7
    assert stats.within_group_auc(scores, outcome, groups) == 0.5


def test_undefined_statistics_are_nan():
    ones = np.ones(4)
    assert np.isnan(stats.auc(np.arange(4), ones))
    assert np.isnan(stats.within_group_auc(np.arange(4), ones, np.zeros(4)))
    assert np.isnan(stats.spearman(ones, np.arange(4)))
    assert np.isnan(stats.false_positive_rate(ones, ones, threshold=0.5, success=0.5))


def test_ece_by_hand_and_missing_pairs_dropped():
    predicted = np.array([0.1, 0.1, 0.9, 0.9, np.nan])
    outcome = np.array([0.0, 1.0, 1.0, 1.0, 1.0])
    assert stats.ece(predicted, outcome) == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)


def test_false_positive_rate_divides_by_failures_only():
    predicted, outcome = np.array([0.9, 0.2, 0.9, 0.9]), np.array([0, 0, 1, 1.0])
    assert stats.false_positive_rate(predicted, outcome, threshold=0.5, success=0.5) == 0.5


def test_spearman_of_a_monotone_map_is_one():
    x = np.random.default_rng(0).normal(size=20)
    assert stats.spearman(x, np.exp(x)) == pytest.approx(1.0)
