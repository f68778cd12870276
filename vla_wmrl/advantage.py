"""Group baselines: rewards of G rollouts from one start -> advantages. Pure (GRPO, arXiv 2402.03300; RWML/WMRL 2.5).

Non-obvious behaviour
* The default only centres. Dividing by each group's own noisy std gives every group unit norm, which breaks the equal
  expectation of the two gradient streams that the fusion rests on (WMRL Eq. 5); "std" is there for parity with the
  papers.
* A missing reward is absent: it enters no mean, no std, and its advantage is 0.
"""

from __future__ import annotations

import numpy as np

SCALES = ("none", "shared", "std")


def group_advantages(
    rewards: np.ndarray,
    valid: np.ndarray,
    scale: str = "none",
    eps: float = 1e-4,
    shared_std: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages [M, G] float64 of rewards [M, G] with presence mask valid [M, G], and zero_spread [M] bool.

    scale "none": r - group mean. "shared": that / (one std + eps), `shared_std` or the `pooled_std` of these groups.
    "std": that / (the group's population std + eps). A group with fewer than two valid rewards, or with all of them
    equal, has advantages of exactly 0 and zero_spread True.
    """
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r}, expected one of {SCALES}")
    centred, count = _centre(rewards, valid)
    # Equality of the rewards themselves, not of a rounded spread: the mean of equal floats need not be that float.
    zero_spread = ~np.any(centred != 0.0, axis=1)
    if scale == "shared":
        centred = centred / ((pooled_std(rewards, valid) if shared_std is None else shared_std) + eps)
    elif scale == "std":
        std = np.sqrt(np.sum(centred**2, axis=1) / np.maximum(count, 1))
        centred = centred / (std[:, None] + eps)
    return centred, zero_spread


def pooled_std(rewards: np.ndarray, valid: np.ndarray) -> float:
    """Within-group std pooled over groups [M, G]: sqrt(sum of centred squares / sum(valid - 1)); 0 if undefined."""
    centred, count = _centre(rewards, valid)
    freedom = np.sum(np.maximum(count - 1, 0))
    return float(np.sqrt(np.sum(centred**2) / freedom)) if freedom else 0.0


def _centre(rewards: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rewards minus their group's mean over valid entries, 0 elsewhere [M, G]; valid entries per group [M]."""
    rewards, valid = np.asarray(rewards, np.float64), np.asarray(valid, bool)
    if rewards.ndim != 2 or rewards.shape != valid.shape:
        raise ValueError(f"rewards and valid must both be [M, G], got {rewards.shape} and {valid.shape}")
    if not np.all(np.isfinite(rewards[valid])):
        raise ValueError("a reward marked valid is NaN or infinite: a missing reward must be marked invalid")
    count = valid.sum(axis=1)
    present = np.where(valid, rewards, 0.0)
    mean = present.sum(axis=1) / np.maximum(count, 1)
    low = np.where(valid, rewards, np.inf).min(axis=1, initial=np.inf)
    high = np.where(valid, rewards, -np.inf).max(axis=1, initial=-np.inf)
    contrast = (count >= 2) & (high > low)
    return np.where(valid & contrast[:, None], present - mean[:, None], 0.0), count
