"""Which groups run for real (WMRL 3.3, footnote 2: whole groups, about one in ten)."""

from __future__ import annotations

import numpy as np

_STREAM = 0xA5C4  # this draw's own stream, so that it is independent of any other use of the same seed


def choose(seed: int, step: int, n_groups: int, fraction: float, minimum: int = 1) -> np.ndarray:
    """Anchor mask [n_groups] bool, uniform over groups and drawn before any outcome exists.

    The count is fraction * n_groups rounded at random, so that it has that expectation, unless `minimum` binds.
    Fraction 0 means no anchors at all, whatever the minimum. Independence from outcomes is what makes the calibration
    valid (methods.md 2.9).
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"anchor fraction {fraction} is outside [0, 1]")
    anchor = np.zeros(n_groups, bool)
    if fraction == 0.0:
        return anchor
    rng = np.random.default_rng([_STREAM, seed, step])
    target = fraction * n_groups
    count = int(target) + int(rng.random() < target - int(target))
    count = min(max(count, minimum), n_groups)
    anchor[rng.permutation(n_groups)[:count]] = True
    return anchor
