import json

import numpy as np
import pytest

from vla_wmrl.advantage import group_advantages
from vla_wmrl.debias import IsotonicDebiaser, fit_isotonic, report

G = 8


def hallucinating(n_groups, seed=0, noise=0.05, bias=True):
    """Pairs of a world model whose scores are the root of the real reward, plus noise: optimistic about failures."""
    rng = np.random.default_rng(seed)
    r_env = rng.random(n_groups * G)
    r_wm = (np.sqrt(r_env) if bias else r_env) + noise * rng.normal(size=len(r_env))
    return np.column_stack([r_wm, r_env]), np.repeat(np.arange(n_groups), G)


def binary(n_groups, signal, seed=0, easy=0.0):
    """Success pairs; `signal` shifts scores by outcome, `easy` by the start's own rate of success."""
    rng = np.random.default_rng(seed)
    start = np.repeat(rng.normal(size=n_groups), G)
    r_env = (rng.random(n_groups * G) < 1 / (1 + np.exp(-1.5 * start))).astype(float)
    r_wm = signal * r_env + easy * start + rng.normal(size=len(r_env))
    return np.column_stack([r_wm, r_env]), np.repeat(np.arange(n_groups), G)


def within(a, groups):
    a = a.reshape(-1, G)
    return a - a.mean(axis=1, keepdims=True)


def test_identity_until_enough_pairs():
    debias = IsotonicDebiaser(min_pairs=40)
    pairs, groups = hallucinating(5)
    debias.observe(pairs[:32], groups[:32])
    assert not debias.ready
    np.testing.assert_array_equal(debias.transform(pairs[:, 0]), pairs[:, 0])
    debias.observe(pairs[32:], groups[32:])
    assert debias.ready


def test_released_constants():
    debias = IsotonicDebiaser.released()
    pairs, groups = hallucinating(1000, noise=0.0)
    for i in range(24):
        debias.observe(pairs[i * G : (i + 1) * G], groups[i * G : (i + 1) * G])
    assert not debias.ready  # 192 pairs
    debias.observe(pairs[192:200], groups[192:200])
    assert debias.ready
    first = debias.transform(pairs[:, 0])
    debias.observe(pairs[200:256], groups[200:256])
    np.testing.assert_array_equal(debias.transform(pairs[:, 0]), first)  # 56 new pairs: not yet
    debias.observe(pairs[256:264], groups[256:264])
    assert np.any(debias.transform(pairs[:, 0]) != first)  # 64
    debias.observe(pairs[264:], groups[264:])
    assert len(debias.pairs_) == 5000
    np.testing.assert_array_equal(debias.pairs_[-1], pairs[-1])  # first in, first out
    assert len(debias.curves_[-1][1].x) <= 10


def test_released_form_is_binned_pav_with_linear_interpolation():
    # Three populated bins, means (.05, .3), (.25, .1), (.95, .9); the first two violate and pool by their counts 3 : 1.
    pairs = np.array([[0.05, 0.3]] * 3 + [[0.25, 0.1]] + [[0.95, 0.9]] * 2)
    debias = IsotonicDebiaser("released", shrink=False).fit(pairs, np.arange(6))
    np.testing.assert_allclose(debias.transform([0.0, 0.05, 0.25, 0.6, 0.95, 1.0]), [0.25, 0.25, 0.25, 0.575, 0.9, 0.9])


def test_released_form_reaches_the_authors_reductions():
    for noise, reduction in ((0.0, 0.9), (0.05, 0.4)):
        pairs, groups = hallucinating(250, noise=noise)
        f = IsotonicDebiaser("released", shrink=False).fit(pairs, groups).transform(pairs[:, 0])
        before, after = (np.mean(((x - x.mean()) - (pairs[:, 1] - pairs[:, 1].mean())) ** 2) for x in (pairs[:, 0], f))
        assert 1 - after / before > reduction


def test_released_form_with_one_populated_bin_stays_identity():
    debias = IsotonicDebiaser("released", min_pairs=4, shrink=False)
    debias.observe(np.array([[0.52, 0.0], [0.53, 1.0]] * 4), np.arange(8))
    assert not debias.ready


@pytest.mark.parametrize("debias", [IsotonicDebiaser(), IsotonicDebiaser(task_strength=50.0), IsotonicDebiaser.released()])
def test_map_is_monotone(debias):
    pairs, groups = binary(60, 1.0)
    pairs[:, 0] = 1 / (1 + np.exp(-pairs[:, 0]))
    debias.fit(pairs, groups, groups % 3)
    grid = np.linspace(-1, 2, 500)
    for task in (0, 1, 2):
        assert np.all(np.diff(debias.transform(grid, task)) >= -1e-12)


@pytest.mark.parametrize("h", [np.exp, lambda s: s**3, lambda s: 1 / (1 + np.exp(-5 * s)), lambda s: 7 * s - 2])
def test_monotone_map_of_scores_changes_nothing_after_calibration(h):
    pairs, groups = binary(40, 1.0, easy=0.3)
    fresh = np.random.default_rng(9).normal(size=1000)
    mapped = np.column_stack([h(pairs[:, 0]), pairs[:, 1]])
    np.testing.assert_array_equal(
        IsotonicDebiaser().fit(pairs, groups).transform(fresh),
        IsotonicDebiaser().fit(mapped, groups).transform(h(fresh)),
    )


def test_constant_world_model_gives_exactly_zero_gradient():
    pairs, groups = binary(20, 1.0)
    constant = np.column_stack([np.full(len(pairs), 0.7), pairs[:, 1]])
    for debias in (
        IsotonicDebiaser(),
        IsotonicDebiaser(shrink=False),
        IsotonicDebiaser.released(),
        IsotonicDebiaser(task_strength=9.0),
    ):
        debias.observe(constant, groups)
        for scale in ("none", "shared", "std"):
            f = debias.transform(np.full((6, G), 0.7))
            advantages, zero = group_advantages(f, np.isfinite(f), scale)
            assert np.all(advantages == 0.0) and zero.all()


def test_bias_shrinks_as_pairs_accumulate():
    fresh, groups = hallucinating(400, seed=99)
    errors = []
    for n in (5, 20, 80, 320):
        draws = []
        for seed in range(10):
            debias = IsotonicDebiaser(max_pairs=10_000).fit(*hallucinating(n, seed=seed))
            draws.append(np.mean(within(debias.transform(fresh[:, 0]) - fresh[:, 1], groups) ** 2))
        errors.append(np.mean(draws))
    raw = np.mean(within(fresh[:, 0] - fresh[:, 1], groups) ** 2)
    floor = 0.05**2 * np.mean(4 * fresh[:, 1])  # noise of the score through the slope of its inverse, 2 sqrt(r)
    assert errors[0] < raw and errors == sorted(errors, reverse=True)
    assert errors[-1] < 1.3 * floor


def test_world_model_without_insight_is_shrunk_to_nothing():
    shrunk, plain = [], []
    for seed in range(20):
        pairs, groups = binary(10, 0.0, seed=seed)
        fresh = np.random.default_rng(seed).normal(size=800)
        for store, debias in ((shrunk, IsotonicDebiaser()), (plain, IsotonicDebiaser(shrink=False))):
            store.append(np.mean(within(debias.fit(pairs, groups).transform(fresh), None) ** 2))
    assert np.mean(shrunk) < 0.2 * np.mean(plain)  # PAV alone fits noise, and noise would enter the gradient


def test_scores_that_only_tell_easy_starts_from_hard_ones_give_no_gradient():
    pairs, groups = binary(100, 0.0, easy=2.0)
    plain = IsotonicDebiaser(shrink=False).fit(pairs, groups)
    debias = IsotonicDebiaser().fit(pairs, groups)
    assert np.ptp(plain.transform(pairs[:, 0])) > 0.5  # calibrated over all starts ...
    assert debias.slope_ < 0.15  # ... and empty inside a group


def test_good_world_model_is_hardly_shrunk():
    debias = IsotonicDebiaser().fit(*binary(60, 3.0))
    assert debias.slope_ > 0.9


def test_slope_is_left_alone_where_pairs_cannot_tell():
    pairs, _ = binary(10, 1.0)
    assert IsotonicDebiaser().fit(pairs, np.arange(len(pairs))).slope_ == 1.0
    assert IsotonicDebiaser().fit(pairs, np.zeros(len(pairs))).slope_ == 1.0


def test_calibrated_mean_is_the_base_rate():
    pairs, groups = binary(80, 1.0)
    f = IsotonicDebiaser().fit(pairs, groups).transform(pairs[:, 0])
    assert f.mean() == pytest.approx(pairs[:, 1].mean(), abs=0.02)
    assert f.min() >= 0.0 and f.max() <= 1.0


def test_repeated_score_levels_are_fitted_as_atoms():
    # Seven-valued scores (methods.md 2.6): 0.525 and 0.6 share a float-edged bin in the released form, not here.
    pairs = np.array([[0.525, 0.0]] * 50 + [[0.6, 1.0]] * 50)
    f = IsotonicDebiaser(shrink=False).fit(pairs, np.arange(100)).transform([0.525, 0.6])
    np.testing.assert_allclose(f, [0.0, 1.0])


def test_isotonic_pools_violators_by_weight():
    curve = fit_isotonic(np.array([1.0, 1.0, 1.0, 2.0, 3.0]), np.array([0.6, 0.6, 0.6, 0.2, 1.0]))
    np.testing.assert_allclose(curve.y, [0.5, 0.5, 1.0])
    np.testing.assert_allclose(curve(np.array([0.0, 1.5, 2.5, 9.0])), [0.5, 0.5, 0.75, 1.0])


def test_perfect_world_model_is_not_blurred():
    rng = np.random.default_rng(0)
    r_env = (rng.random(160) < 0.5).astype(float)
    f = IsotonicDebiaser().fit(np.column_stack([r_env + 0.1 * rng.random(160), r_env]), np.repeat(np.arange(20), G))
    error = np.abs(f.transform(r_env + 0.1 * rng.random(160)) - r_env)
    assert np.sum(error > 0.01) <= 4 and error.max() <= 0.5  # only scores in the gap between the classes are in doubt


def test_missing_reward_stays_missing_and_nan_pairs_are_dropped():
    pairs, groups = binary(20, 1.0)
    holed = pairs.copy()
    holed[3, 0], holed[9, 1] = np.nan, np.nan
    debias = IsotonicDebiaser().fit(holed, groups)
    keep = np.isfinite(holed).all(axis=1)
    other = IsotonicDebiaser().fit(pairs[keep], groups[keep])
    grid = np.array([[-1.0, np.nan], [0.0, 2.0]])
    np.testing.assert_array_equal(debias.transform(grid), other.transform(grid))
    assert np.isnan(debias.transform(grid)[0, 1]) and np.isnan(IsotonicDebiaser().transform(grid)[0, 1])
    assert np.isnan(debias.out_of_fold(holed, groups)[[3, 9]]).all()


def test_pair_never_calibrates_itself_out_of_fold():
    pairs, groups = binary(12, 1.0)
    debias = IsotonicDebiaser()
    before = debias.out_of_fold(pairs, groups)
    for g in range(12):
        flipped = pairs.copy()
        flipped[groups == g, 1] = 1 - flipped[groups == g, 1]
        after = debias.out_of_fold(flipped, groups)
        np.testing.assert_array_equal(after[groups == g], before[groups == g])
    assert np.isnan(debias.out_of_fold(pairs[:8], np.zeros(8))).all()


def test_out_of_fold_error_is_not_the_flattering_in_sample_one():
    pairs, groups = binary(30, 0.0)
    debias = IsotonicDebiaser(shrink=False).fit(pairs, groups)
    fresh, _ = binary(500, 0.0, seed=5)
    mse = {
        "in": np.mean(within(debias.transform(pairs[:, 0]) - pairs[:, 1], groups) ** 2),
        "out": np.mean(within(debias.out_of_fold(pairs, groups) - pairs[:, 1], groups) ** 2),
        "fresh": np.mean(within(debias.transform(fresh[:, 0]) - fresh[:, 1], None) ** 2),
    }
    assert mse["in"] < mse["out"]


def test_tasks_of_opposite_difficulty_get_their_own_level():
    rng = np.random.default_rng(0)
    tasks = np.repeat([0, 1], 800)
    score = rng.normal(size=1600)
    r_env = (score > np.where(tasks == 0, 1.0, -1.0)).astype(float)  # each task has its own threshold
    pairs, groups = np.column_stack([score, r_env]), np.repeat(np.arange(200), G)
    pooled, own = IsotonicDebiaser(), IsotonicDebiaser(task_strength=50.0)
    error = [np.mean((d.fit(pairs, groups, tasks).transform(score, tasks) - r_env) ** 2) for d in (pooled, own)]
    assert error[1] < 0.3 * error[0]
    few = IsotonicDebiaser(task_strength=1e9).fit(pairs, groups, tasks)
    np.testing.assert_allclose(few.transform(score, tasks), pooled.transform(score), atol=0.02)


@pytest.mark.parametrize(
    "make", [IsotonicDebiaser, IsotonicDebiaser.released, lambda: IsotonicDebiaser(task_strength=20.0, max_pairs=300)]
)
def test_state_round_trip_is_bit_equal_and_so_is_what_follows(make):
    pairs, groups = hallucinating(60)
    tasks, grid = groups % 3, np.linspace(-0.5, 1.5, 400)
    a, b, c = make(), make(), make()
    for i in range(0, 304, G):  # the released form is then 40 pairs into its next 64
        a.observe(pairs[i : i + G], groups[i : i + G], tasks[i : i + G])
    b.load_state_dict(a.state_dict())
    c.load_state_dict(
        json.loads(json.dumps({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in a.state_dict().items()}))
    )
    for other in (b, c):
        np.testing.assert_array_equal(a.transform(grid, 1), other.transform(grid, 1))
    for i in range(304, 480, G):
        for d in (a, b, c):
            d.observe(pairs[i : i + G], groups[i : i + G], tasks[i : i + G])
        for other in (b, c):
            np.testing.assert_array_equal(a.transform(grid, 1), other.transform(grid, 1))
    fresh = make()
    fresh.load_state_dict(make().state_dict())
    assert not fresh.ready


def test_state_is_a_copy():
    debias = IsotonicDebiaser().fit(*hallucinating(10))
    state = debias.state_dict()
    state["pairs"][:] = 0
    assert debias.pairs_.any()


def test_refit_every_counts_new_pairs():
    debias = IsotonicDebiaser(min_pairs=8, refit_every=24)
    pairs, groups = hallucinating(10)
    debias.observe(pairs[:24], groups[:24])
    first = debias.transform(pairs[:, 0])
    debias.observe(pairs[24:40], groups[24:40])
    np.testing.assert_array_equal(debias.transform(pairs[:, 0]), first)
    debias.observe(pairs[40:48], groups[40:48])
    assert np.any(debias.transform(pairs[:, 0]) != first)


def test_diagnostics_name_bias_before_and_after():
    debias = IsotonicDebiaser().fit(*hallucinating(60))
    figures = debias.diagnostics(threshold=0.5, success=0.5)
    assert figures["before_bias"] > 0.1 and abs(figures["after_bias"]) < 0.01
    assert figures["after_ece"] < figures["before_ece"]
    assert figures["after_false_positive_rate"] < figures["before_false_positive_rate"]
    assert figures["residual_reduction"] > 0.4 and figures["pairs"] == 480


def test_report_measures_within_groups_only():
    groups = np.repeat([0, 1], G)
    r_env = np.tile([0.0, 1.0], G)
    figures = report(r_env + groups * 0.3, r_env, groups, threshold=0.5, success=0.5)
    assert figures["bias"] == pytest.approx(0.15) and figures["within_mse"] == pytest.approx(0.0, abs=1e-15)


def test_lengths_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="as long"):
        IsotonicDebiaser().observe(np.zeros((4, 2)), np.zeros(3))
