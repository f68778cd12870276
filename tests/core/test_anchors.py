import numpy as np
import pytest

from vla_wmrl.anchors import choose


def test_same_key_same_choice_and_different_steps_differ():
    assert np.array_equal(choose(3, 5, 40, 0.25), choose(3, 5, 40, 0.25))
    assert not all(np.array_equal(choose(3, 5, 40, 0.25), choose(3, s, 40, 0.25)) for s in range(6, 12))


def test_choice_ignores_and_leaves_the_global_generator():
    np.random.seed(0)
    before, first = np.random.get_state()[1].copy(), choose(1, 2, 16, 0.3)
    np.random.seed(123)
    assert np.array_equal(first, choose(1, 2, 16, 0.3))
    np.random.seed(0)
    assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize(("n", "fraction"), [(8, 0.3), (10, 0.1), (7, 0.5), (3, 0.9)])
def test_expected_count_is_fraction_times_groups(n, fraction):
    counts = np.array([choose(0, s, n, fraction, minimum=0).sum() for s in range(4000)])
    assert abs(counts.mean() - n * fraction) < 4 * 0.5 / np.sqrt(4000)
    assert np.ptp(counts) <= 1  # rounding at random, not a binomial


def test_every_position_is_as_likely():
    share = np.mean([choose(0, s, 8, 0.25) for s in range(4000)], axis=0)
    np.testing.assert_allclose(share, 0.25, atol=0.03)


def test_minimum_binds_and_is_bounded_by_the_groups():
    assert all(choose(0, s, 8, 0.01).sum() == 1 for s in range(50))
    assert choose(0, 0, 2, 0.01, minimum=5).all()


def test_fraction_zero_means_none_and_one_means_all():
    assert not choose(0, 0, 8, 0.0, minimum=1).any()
    assert choose(0, 0, 8, 1.0).all()
    assert choose(0, 0, 0, 0.5).shape == (0,)


def test_fraction_outside_unit_interval_is_refused():
    with pytest.raises(ValueError, match="fraction"):
        choose(0, 0, 8, 1.5)
