"""The too-easy filter (RWML s2.2): triplets that a lightly trained copy always predicts right are kept one time in ten.

    flagged = every one of K rewards is 1                    kept = not flagged, or with probability p (0.1)

The paper prints "mean reward >= tau_easy" with tau_easy = 0.0, which would flag everything, and reports about 30 %
flagged. "Always right" is the rule of its text; `flag` takes another share where that suits the data better.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from vla_wmrl.errors import require


def flag(rewards: np.ndarray, share: float = 1.0) -> np.ndarray:
    """Which of N triplets are too easy [N] bool, from rewards [N, K] of K predictions each, by the share that is right.

    A missing reward (NaN) is not counted; a triplet with none at all is not flagged.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    require(rewards.ndim == 2 and rewards.shape[1] > 0, "the filter needs rewards of shape [triplets, samples]")
    require(0.0 < share <= 1.0, f"share={share} must lie in (0, 1]")
    known = np.isfinite(rewards)
    count = known.sum(axis=1)
    right = np.where(known, rewards, 0.0).sum(axis=1)
    return (count > 0) & (right >= share * count - 1e-9)


def keep(ids: Sequence[str], flagged: np.ndarray, p: float = 0.1, seed: int = 0) -> np.ndarray:
    """Which triplets to train on [N] bool: all that are not flagged, and a share p of those that are.

    Drawn by (seed, id), so order, sharding and other triplets change nothing.
    """
    require(0.0 <= p <= 1.0, f"p={p} is outside 0..1")
    require(len(ids) == len(flagged), "as many ids as flags are needed")
    drawn = np.array([_uniform(seed, i) < p for i in ids], dtype=bool)
    return ~np.asarray(flagged, dtype=bool) | drawn


def _uniform(seed: int, name: str) -> float:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]) / 256**7


def report(flagged: np.ndarray, kept: np.ndarray) -> dict[str, float]:
    """Shares for the data card. RWML's are 0.275 flagged, 0.247 dropped (ALFWorld, from its counts)."""
    return {"n": len(flagged), "flagged": float(np.mean(flagged)), "dropped": float(1.0 - np.mean(kept))}
