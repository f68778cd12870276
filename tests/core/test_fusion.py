import json

import numpy as np
import pytest

from vla_wmrl.advantage import group_advantages
from vla_wmrl.debias import IsotonicDebiaser
from vla_wmrl.fusion import KINDS, Fusion, Guard

G = 8
SKEW = np.array([1.0, -0.5])  # direction of the true gradient


def streams(n, seed, noise, m_anchor=2, m_wm=6, f=lambda r: r):
    """n batches: score vectors S [n, groups, G, 2], real rewards r = S.SKEW/4 + luck, and f of a noisy copy."""
    rng = np.random.default_rng(seed)
    s = rng.normal(size=(n, m_anchor + m_wm, G, 2))
    r = s @ SKEW / 4 + rng.normal(size=s.shape[:3])
    wm = f(r + noise * rng.normal(size=r.shape))
    return s, r, wm


def group_gradients(s, reward):
    """[n, groups, 2]: mean over a group of centred reward times score."""
    return np.mean((reward - reward.mean(-1, keepdims=True))[..., None] * s, axis=2)


def fused(w, g_real, g_wm, n_anchor, twin=0.0):
    """What a loss that averages all groups makes of the factors."""
    n_wm = g_wm.shape[1] - n_anchor
    parts = [w.anchor * g_real[:, :n_anchor], w.wm * g_wm[:, n_anchor:], w.twin * g_wm[:, :n_anchor]]
    return sum(part.sum(axis=1) for part in parts) / (n_anchor + n_wm)


def observed(kind, noise, f=lambda r: r, groups=1000, **options):
    fusion = Fusion(kind, half_life_groups=1000, **options)
    _, r, wm = streams(1, 77, noise, groups, 0, f)
    fusion.observe(wm[0], r[0])
    return fusion


def total_variance(g):
    return g.var(axis=0).sum()


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["inverse_variance", "ppi"])
def test_fused_variance_is_at_most_the_smaller_stream(kind, noise):
    n_anchor, n = 2, 6000
    s, r, wm = streams(n, 1, noise)
    g_real, g_wm = group_gradients(s, r), group_gradients(s, wm)
    g = fused(observed(kind, noise).weights(n_anchor, 6), g_real, g_wm, n_anchor)
    alone = total_variance(g_real[:, :n_anchor].mean(axis=1)), total_variance(g_wm[:, n_anchor:].mean(axis=1))
    smaller = (
        min(alone) if kind == "inverse_variance" else alone[0]
    )  # PPI pays for unbiasedness: it only has to beat the anchors
    assert total_variance(g) < 1.02 * smaller
    np.testing.assert_allclose(g.mean(axis=0), g_real.mean(axis=(0, 1)), atol=0.02)  # and it stays unbiased


def test_inverse_variance_weight_is_the_measured_ratio_of_variances():
    for noise in (0.5, 1.0, 2.0):
        s, r, wm = streams(20_000, 2, noise)
        ratio = total_variance(group_gradients(s, wm)[:, 0]) / total_variance(group_gradients(s, r)[:, 0])
        w = observed("inverse_variance", noise).weights(2, 6)
        assert w.anchor / w.wm == pytest.approx(ratio, rel=0.05)


def test_inverse_variance_is_the_best_weight_and_equal_weights_are_not():
    n_anchor, noise = 2, 2.0
    s, r, wm = streams(6000, 3, noise)
    g_real, g_wm = group_gradients(s, r), group_gradients(s, wm)
    best = total_variance(fused(observed("inverse_variance", noise).weights(2, 6), g_real, g_wm, n_anchor))
    assert best < 0.97 * total_variance(fused(Fusion("none").weights(2, 6), g_real, g_wm, n_anchor))


def test_reliability_is_unbiased_up_to_the_best_step_and_beats_both_streams():
    """f = E[r | r_wm] is shrunk by R^2; the fused gradient must point the same way with the full length."""
    n_anchor, noise = 2, 1.0
    shrink = 1.0 / (1.0 + noise**2 / (1.0 + 0.3125 / 4))
    s, r, wm = streams(8000, 4, noise, f=lambda x: shrink * x)
    g_real, g_wm = group_gradients(s, r), group_gradients(s, wm)
    g = fused(observed("reliability", noise, lambda x: shrink * x).weights(2, 6), g_real, g_wm, n_anchor)
    np.testing.assert_allclose(g.mean(axis=0), g_real.mean(axis=(0, 1)), atol=0.02)
    unbiased_wm = (g_wm / shrink)[:, n_anchor:].mean(axis=1)
    assert total_variance(g) < min(total_variance(g_real[:, :n_anchor].mean(axis=1)), total_variance(unbiased_wm))


def test_ppi_is_unbiased_for_a_world_model_that_misleads():
    n_anchor = 2
    s, r, wm = streams(6000, 5, 0.5)
    wm = wm + s[..., 1]  # prefers the wrong second direction
    g_real, g_wm = group_gradients(s, r), group_gradients(s, wm)
    fusion = Fusion("ppi")
    fusion.observe(wm[:50, 0], r[:50, 0])
    assert fusion.weights(2, 6).twin < -0.5
    g = fused(fusion.weights(2, 6), g_real, g_wm, n_anchor)
    np.testing.assert_allclose(g.mean(axis=0), g_real.mean(axis=(0, 1)), atol=0.03)
    naive = fused(Fusion("none").weights(2, 6), g_real, g_wm, n_anchor)
    assert abs(naive.mean(axis=0)[1] - g_real.mean(axis=(0, 1))[1]) > 0.3


def test_ppi_lambda_is_the_published_one():
    fusion = Fusion("ppi", min_groups=1)
    f = np.array([[0.0, 2.0, 0.0, 2.0]])
    r = np.array([[0.0, 1.0, 1.0, 2.0]])  # Cov = 0.5, Var f = 1
    fusion.observe(f, r)
    lam = 0.5 / (1 + 2 / 6)
    assert fusion.weights(2, 6) == pytest.approx((4.0, lam * 8 / 6, -lam * 4.0))
    fusion.observe(-f, r)
    fusion.observe(-f, r)
    assert fusion.weights(2, 6) == pytest.approx((4.0, 0.0, 0.0))  # anticorrelated: clipped at 0
    close = Fusion("ppi", min_groups=1)
    close.observe(0.5 * r, r)
    assert close.weights(1, 1000).wm == pytest.approx(1001 / 1000)  # clipped at 1


@pytest.mark.parametrize("kind", ["none", "inverse_variance", "mse"])
def test_eq5_denominator_keeps_the_step_size(kind):
    for n_anchor, n_wm in ((1, 7), (2, 6), (7, 1), (4, 4)):
        w = observed(kind, 1.5).weights(n_anchor, n_wm)
        assert n_anchor * w.anchor + n_wm * w.wm == pytest.approx(n_anchor + n_wm)  # identical group gradients: the plain mean


def test_eq5_value_by_hand():
    fusion = Fusion("inverse_variance", min_groups=1)
    fusion.observe(np.array([[0.0, 2.0]]), np.array([[0.0, 1.0]]))  # residual +-1/2, real +-1/2: s^2 = 1
    assert fusion.statistics()["s2"] == pytest.approx(1.0)
    assert fusion.weights(1, 7) == pytest.approx((2 * 8 / 9, 8 / 9, 0.0))


def test_residual_is_centred_within_its_group():
    fusion = Fusion(min_groups=1)
    r = np.array([[0.0, 1.0, 1.0]])
    fusion.observe(r + 5.0, r)  # an offset is cancelled by the baseline
    assert fusion.statistics()["s2"] == pytest.approx(0.0, abs=1e-12)


def test_released_constants_reproduce_the_authors_weights():
    fusion = Fusion("released")
    f, r = np.array([[0.0, 0.5]]), np.array([[0.0, 1.0]])  # s^2 = 1/4
    for _ in range(31):
        fusion.observe(f, r)
        assert fusion.weights(1, 7) == (1.0, 1.0, 0.0)
    fusion.observe(f, np.array([[1.0, 1.0]]))  # no contrast in r: skipped, not counted
    assert fusion.weights(1, 7) == (1.0, 1.0, 0.0)
    fusion.observe(f, r)
    assert fusion.weights(1, 7) == pytest.approx((2.0, 1.0, 0.0))  # the 32nd: the target, and no denominator (1.125x for m = 8)
    assert fusion.released_[2] == pytest.approx(4.0)
    for _ in range(64):
        fusion.observe(r, r)  # s^2 = 0 for one half-life: half the excess is left, c is frozen
    assert fusion.released_weight == pytest.approx(1.5)
    for _ in range(1000):
        fusion.observe(np.array([[0.0, -9.0]]), r)
    assert fusion.released_weight == 4.0


def test_running_mean_has_the_half_life_and_no_start_up_bias():
    fusion = Fusion(half_life_groups=10, min_groups=1)
    r = np.array([[0.0, 1.0]])
    fusion.observe(0.5 * r, r)
    assert fusion.statistics()["s2"] == pytest.approx(0.25)  # after one group it is that group's
    for _ in range(500):
        fusion.observe(0.5 * r, r)
    for _ in range(10):
        fusion.observe(r, r)
    assert fusion.statistics()["s2"] == pytest.approx(0.125)


def test_contrast_where_reality_has_none_is_charged():
    rng = np.random.default_rng(0)
    honest, hallucinating = Fusion(), Fusion()
    for i in range(40):
        r = rng.integers(0, 2, (1, G)).astype(float) if i % 2 else np.zeros((1, G))
        honest.observe(np.zeros((1, G)) if i % 2 == 0 else r * 0.9, r)
        hallucinating.observe(rng.random((1, G)) if i % 2 == 0 else r * 0.9, r)
    assert hallucinating.statistics()["s2"] > honest.statistics()["s2"] + 0.2
    never = Fusion()
    never.observe(rng.random((10, G)), np.zeros((10, G)))
    assert never.weights(1, 7).wm < 1e-4


def test_mse_sets_the_bias_apart_and_it_does_not_average_out():
    noisy, biased = observed("mse", 1.0), observed("mse", 0.0, lambda x: 2.0 * x)
    assert noisy.statistics()["bias2"] == pytest.approx(0.5, abs=0.1)  # classical noise: f overstates by 1 + noise^2
    assert biased.statistics()["s2"] == pytest.approx(1.0) and biased.statistics()["bias2"] == pytest.approx(1.0)
    few, many = biased.weights(1, 2), biased.weights(1, 20)
    assert few.anchor / few.wm == pytest.approx(1 + 2 * 1.0) and many.anchor / many.wm == pytest.approx(1 + 20 * 1.0)
    shrink = 1.0 / (1.0 + 1.0 / (1.0 + 0.3125 / 4))
    calibrated = observed("mse", 1.0, lambda x: shrink * x)
    assert calibrated.statistics()["bias2"] < 0.02


def test_max_weight_bounds_the_ratio():
    w = observed("inverse_variance", 9.0, max_weight=4.0).weights(1, 7)
    assert w.anchor / w.wm == pytest.approx(4.0)


@pytest.mark.parametrize("kind", KINDS)
def test_before_warm_up_and_at_the_edges(kind):
    fusion = Fusion(kind)
    if kind != "ppi":
        assert fusion.weights(2, 6) == (1.0, 1.0, 0.0)
    assert fusion.weights(8, 0)[:2] == (1.0, 1.0)
    assert fusion.weights(0, 8)[:2] == (1.0, 1.0)
    assert fusion.weights(2, 6, wm_ok=False) == (4.0, 0.0, 0.0)
    assert fusion.weights(0, 8, wm_ok=False) == (0.0, 0.0, 0.0)


def test_ppi_before_warm_up_is_plain_grpo_on_anchors():
    assert Fusion("ppi").weights(2, 6) == (4.0, 0.0, 0.0)


def test_reliability_degrades_to_plain_grpo_and_inverse_variance_does_not():
    rng = np.random.default_rng(0)
    r, f = rng.random((400, G)), rng.random((400, G)) * 1e-3  # calibrated to almost nothing
    fusions = {kind: Fusion(kind) for kind in ("reliability", "inverse_variance")}
    for fusion in fusions.values():
        fusion.observe(f, r)
    assert fusions["reliability"].weights(1, 7).anchor == pytest.approx(8.0, rel=0.2)
    assert fusions["inverse_variance"].weights(1, 7).anchor == pytest.approx(2 * 8 / 9, rel=0.05)


def test_missing_rewards_and_groups_of_one_are_absent():
    a, b = Fusion(), Fusion()
    f, r = np.array([[0.0, 0.6, 1.0], [0.5, 0.1, 0.2]]), np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    a.observe(np.array([[0.0, 0.6, np.nan], [0.5, 0.1, 0.2], [0.3, np.nan, np.nan]]), np.vstack([r, [1.0, 0.0, np.nan]]))
    valid = np.array([[1, 1, 0], [1, 1, 1]], bool)
    b.observe(f, r, valid)
    assert a.statistics() == b.statistics() and a.n_groups_ == 2


def pairs(n_groups, signal, seed=0):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(n_groups), G)
    r = (rng.random(n_groups * G) < 0.5).astype(float)
    return signal * r + rng.normal(size=len(r)), r, groups


def test_guard_fires_on_a_useless_world_model_and_says_why():
    fired = [bool(Guard().useless(*pairs(48, 0.0, seed))) for seed in range(40)]
    assert np.mean(fired) > 0.85
    assert "rank correlation" in Guard().useless(*pairs(48, -1.0))


def test_guard_leaves_a_useful_world_model_alone():
    assert not any(Guard().useless(*pairs(n, 1.0, seed)) for n in (8, 16, 48) for seed in range(40))


def test_guard_needs_confidence_not_a_point_estimate():
    # Weak but real, and few pairs: the point estimate is below the floor now and then, the bound hardly ever.
    results = [(Guard().useless(*pairs(10, 0.5, seed)), pairs(10, 0.5, seed)) for seed in range(100)]
    below = [np.corrcoef(f, r)[0, 1] < 0.2 for _, (f, r, _) in results]
    assert np.mean(below) > 0.2 and np.mean([bool(reason) for reason, _ in results]) < 0.1
    f, r, groups = pairs(7, -2.0)
    assert Guard(min_groups=2).useless(f, r, groups) == ""  # 56 pairs are not enough to say, whatever they say
    assert Guard(min_groups=2, min_pairs=56).useless(f, r, groups)
    assert not Guard(min_pairs=56).useless(f, r, groups).startswith("rank")  # nor are 7 groups


def test_guard_judges_ranks_not_the_scale_of_scores():
    f, r, groups = pairs(40, 1.5)
    assert Guard().useless(np.exp(8 * f), r, groups) == ""  # one outlier would decide a correlation of values


def test_guard_catches_success_imagined_on_hopeless_starts():
    f, r, groups = pairs(32, 3.0)  # ranks well inside groups that have contrast ...
    f, r = np.concatenate([f, np.full(320, 3.5)]), np.concatenate([r, np.zeros(320)])  # ... and cheers where all fail
    groups = np.concatenate([groups, 100 + np.repeat(np.arange(40), G)])
    assert "real failures" in Guard().useless(f, r, groups)
    assert "real failures" in Guard(threshold=2.0).useless(f, r, groups)
    fusion = Fusion(guard=Guard(), guard_window=100)
    fusion.observe(f.reshape(-1, G), r.reshape(-1, G))
    assert fusion.reason_ == Guard().useless(f, r, groups)
    missing = np.append(f, np.nan), np.append(r, 1.0), np.append(groups, 999)
    assert "real failures" in Guard().useless(*missing)
    assert Guard(threshold=4.5).useless(f, r, groups) == ""
    assert Guard(max_false_positives=0.95).useless(f, r, groups) == ""


def test_guard_on_a_constant_world_model():
    _, r, groups = pairs(20, 0.0)
    assert Guard().useless(np.full(len(r), 0.5), r, groups)


def test_guard_is_invariant_to_a_monotone_map_and_drops_missing_pairs():
    f, r, groups = pairs(40, 0.1)
    first = Guard().useless(f, r, groups)
    assert bool(first) == bool(Guard().useless(np.exp(f), r, groups))
    holes = np.append(f, np.nan), np.append(r, 1.0), np.append(groups, 99)
    assert Guard().useless(*holes) == first


def test_fired_guard_leaves_plain_grpo_on_anchors_and_recovers():
    fusion = Fusion(guard=Guard(), guard_window=24)
    f, r, _ = pairs(48, 0.0)
    fusion.observe(f.reshape(-1, G), 0 * f.reshape(-1, G) + r.reshape(-1, G))
    fusion.observe(-r.reshape(-1, G), r.reshape(-1, G))
    assert fusion.reason_ and fusion.weights(2, 6) == (4.0, 0.0, 0.0)
    assert fusion.statistics()["guard"] == 1.0
    f, r, _ = pairs(24, 3.0)
    fusion.observe(f.reshape(-1, G), r.reshape(-1, G))
    assert not fusion.reason_ and fusion.weights(2, 6).wm > 0
    assert len(np.unique(fusion.recent_[:, 0])) == 24


def test_without_a_guard_nothing_is_switched_off():
    fusion = Fusion("none")
    f, r, _ = pairs(48, -1.0)
    fusion.observe(f.reshape(-1, G), r.reshape(-1, G))
    assert fusion.weights(2, 6) == (1.0, 1.0, 0.0)


def test_constant_world_model_through_the_whole_chain_gives_zero():
    debias, fusion = IsotonicDebiaser(), Fusion()
    rng = np.random.default_rng(0)
    for step in range(10):
        r = rng.integers(0, 2, (1, G)).astype(float)
        f = debias.transform(np.full((1, G), 0.3))
        debias.observe(np.column_stack([np.full(G, 0.3), r[0]]), np.full(G, step))
        fusion.observe(f, r)
    f = debias.transform(np.full((7, G), 0.3))
    assert np.all(group_advantages(f, np.isfinite(f))[0] * fusion.weights(1, 7).wm == 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_state_round_trip_is_bit_equal_and_so_is_what_follows(kind):
    a, b = Fusion(kind, guard=Guard()), Fusion(kind, guard=Guard())
    f, r, _ = pairs(80, 0.4)
    f, r = f.reshape(-1, G), r.reshape(-1, G)
    a.observe(f[:40], r[:40])
    state = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in a.state_dict().items()}
    b.load_state_dict(json.loads(json.dumps(state)))
    for i in range(40, 80):
        assert a.weights(2, 6) == b.weights(2, 6) and a.reason_ == b.reason_ and a.statistics() == b.statistics()
        a.observe(f[i : i + 1], r[i : i + 1])
        b.observe(f[i : i + 1], r[i : i + 1])
    fresh = Fusion(kind)
    fresh.load_state_dict(Fusion(kind).state_dict())
    assert fresh.weights(2, 6) == Fusion(kind).weights(2, 6)


def test_observing_groups_one_by_one_or_at_once_is_the_same():
    f, r, _ = pairs(20, 1.0)
    f, r = f.reshape(-1, G), r.reshape(-1, G)
    a, b = Fusion(), Fusion()
    a.observe(f, r)
    for i in range(20):
        b.observe(f[i : i + 1], r[i : i + 1])
    assert a.statistics() == b.statistics()


def test_no_bound_on_the_weight_is_no_bound_and_no_crash():
    """`fusion.max_weight: null` of a config reaches Fusion as None."""
    fusions = [Fusion("inverse_variance", min_groups=1, max_weight=bound) for bound in (None, np.inf)]
    rng = np.random.default_rng(0)
    for fusion in fusions:
        r = rng.random((4, 8))
        fusion.observe(np.zeros_like(r), r)
    assert all(0.0 < fusion.weights(4, 36, True).wm < fusion.weights(4, 36, True).anchor for fusion in fusions)
