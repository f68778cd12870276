import numpy as np
import pytest

from vla_wmrl.advantage import SCALES, group_advantages, pooled_std

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("scale", SCALES)
def test_missing_reward_is_absent_not_zero(scale):
    rewards = np.array([[1.0, 0.5, np.nan, 0.0]])
    valid = np.isfinite(rewards)
    full, _ = group_advantages(rewards[:, [0, 1, 3]], np.ones((1, 3), bool), scale)
    holed, _ = group_advantages(rewards, valid, scale)
    np.testing.assert_array_equal(holed[0, [0, 1, 3]], full[0])
    assert holed[0, 2] == 0.0


def test_value_behind_an_invalid_mask_never_leaks():
    rewards = RNG.random((3, 4))
    valid = np.array([[1, 1, 1, 0]] * 3, bool)
    garbage = np.where(valid, rewards, 1e9)
    for scale in SCALES:
        np.testing.assert_array_equal(group_advantages(rewards, valid, scale)[0], group_advantages(garbage, valid, scale)[0])


@pytest.mark.parametrize("scale", SCALES)
def test_group_of_one_valid_reward_is_zero(scale):
    advantages, zero = group_advantages(
        np.array([[0.9, np.nan], [np.nan, np.nan]]), np.array([[True, False], [False, False]]), scale
    )
    np.testing.assert_array_equal(advantages, 0.0)
    assert zero.all()


@pytest.mark.parametrize("scale", SCALES)
def test_all_equal_group_contributes_exactly_zero(scale):
    rewards = np.vstack([np.full(7, 0.1), RNG.random(7)])  # the mean of seven 0.1 is not 0.1 in floats
    advantages, zero = group_advantages(rewards, np.ones((2, 7), bool), scale)
    np.testing.assert_array_equal(advantages[0], 0.0)
    np.testing.assert_array_equal(zero, [True, False])


def test_default_is_centre_only():
    rewards = RNG.random((5, 8))
    advantages, _ = group_advantages(rewards, np.ones((5, 8), bool))
    np.testing.assert_allclose(advantages, rewards - rewards.mean(1, keepdims=True), atol=1e-15)


def test_std_is_the_papers_population_std_plus_eps():
    advantages, _ = group_advantages(np.array([[0.0, 0.0, 0.0, 1.0]]), np.ones((1, 4), bool), "std", eps=1e-4)
    assert advantages[0, 3] == pytest.approx(0.75 / (np.sqrt(0.1875) + 1e-4))


def test_shared_scale_keeps_relative_size_of_groups_and_can_be_passed_in():
    rewards = np.array([[0.0, 1.0], [0.4, 0.6]])
    advantages, _ = group_advantages(rewards, np.ones((2, 2), bool), "shared", eps=0.0)
    assert advantages[0, 1] / advantages[1, 1] == pytest.approx(5.0)
    assert pooled_std(rewards, np.ones((2, 2), bool)) == pytest.approx(np.sqrt((0.5 + 0.02) / 2))
    given, _ = group_advantages(rewards, np.ones((2, 2), bool), "shared", eps=0.0, shared_std=2.0)
    assert given[0, 1] == pytest.approx(0.25)


def test_pooled_std_ignores_masked_entries_and_groups_of_one():
    rewards = np.array([[0.0, 1.0, 1e9], [5.0, 1e9, 1e9]])
    valid = np.array([[1, 1, 0], [1, 0, 0]], bool)
    assert pooled_std(rewards, valid) == pytest.approx(np.sqrt(0.5))


def test_nan_marked_valid_is_refused():
    with pytest.raises(ValueError, match="marked valid"):
        group_advantages(np.array([[0.0, np.nan]]), np.ones((1, 2), bool))


def test_no_groups_is_fine():
    advantages, zero = group_advantages(np.empty((0, 8)), np.empty((0, 8), bool), "shared")
    assert advantages.shape == (0, 8) and zero.shape == (0,)
