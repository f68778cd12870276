import numpy as np
import pytest

from vla_wmrl.policies.noise import INITIAL, SDE, choice, noise


def test_same_key_same_noise_whatever_was_drawn_before():
    first = noise((1, 2, 3), (4, 5))
    noise((9, 9, 9), (100,))
    assert np.array_equal(first, noise((1, 2, 3), (4, 5)))
    assert first.dtype == np.float32


def test_keys_that_differ_anywhere_do_not_share_noise():
    keys = [(1, 2), (1, 2, 0), (2, 1), (0, 1, 2), (1, 2 + 2**32), (1 + 2**32, 2), (1, 2, 0, 0)]
    drawn = [tuple(noise(key, (8,))) for key in keys]
    assert len(set(drawn)) == len(keys)


def test_streams_of_one_key_are_independent():
    initial, sde = noise((5, 6), (20_000,), INITIAL), noise((5, 6), (20_000,), SDE)
    assert abs(np.corrcoef(initial, sde)[0, 1]) < 0.03


def test_step_choice_is_uniform_over_keys_and_independent_of_the_noise():
    chosen = np.array([choice((0, i), 5) for i in range(5000)])
    assert np.all(np.abs(np.bincount(chosen, minlength=5) / 5000 - 0.2) < 0.02)
    first = np.array([noise((0, i), (1,))[0] for i in range(5000)])
    assert abs(np.corrcoef(chosen, first)[0, 1]) < 0.05


def test_numpy_integers_are_keys_like_python_integers():
    assert np.array_equal(noise((np.int64(3), np.uint32(4)), (3,)), noise((3, 4), (3,)))


def test_negative_key_is_refused_not_wrapped():
    with pytest.raises(ValueError, match="noise key"):
        noise((0, -1), (2,))
