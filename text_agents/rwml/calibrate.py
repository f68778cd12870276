"""A distance threshold for an embedder: how well does "nearer than tau_d" tell the true next state from another one?

Precision is measured on pairs that should count (a state against itself retold, or itself) and pairs that should not (a
state against one that came at another time). The proposal is the largest threshold that keeps the precision asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_wmrl.errors import require


@dataclass(frozen=True)
class Threshold:
    tau: float | None  # None: no threshold is precise enough
    precision: float  # of pairs nearer than tau, the share that should count (equal numbers of both)
    recall: float  # of pairs that should count, the share nearer than tau
    false_positive_rate: float  # of pairs that should not count, the share nearer than tau
    pairs: int


def curve(same: np.ndarray, other: np.ndarray, taus: np.ndarray) -> dict[str, np.ndarray]:
    """Recall, false positives and precision [T] at thresholds [T], from distances of pairs that should and should not count.

    Precision weighs both kinds equally, however many there are of each; NaN where nothing is nearer.
    """
    recall = (same[None, :] < taus[:, None]).mean(axis=1)
    false = (other[None, :] < taus[:, None]).mean(axis=1)
    with np.errstate(invalid="ignore"):
        precision = recall / (recall + false)
    return {"tau": taus, "recall": recall, "false_positive_rate": false, "precision": precision}


def propose(same: np.ndarray, other: np.ndarray, precision: float = 0.95, step: float = 0.01) -> Threshold:
    """The largest threshold (a multiple of `step`, at most 0.5) with at least this precision.

    0.5: above it rewards are for generic descriptions (RWML, Table A2).
    """
    require(len(same) > 0 and len(other) > 0, "calibration needs pairs of both kinds: more triplets")
    require(0.5 < precision <= 1.0, f"precision={precision} must lie in (0.5, 1]")
    taus = np.round(np.arange(step, 0.5 + step / 2, step), 6)
    found = curve(same, other, taus)
    enough = np.flatnonzero(found["precision"] >= precision)
    pairs = len(same) + len(other)
    if len(enough) == 0:
        return Threshold(None, float("nan"), 0.0, 0.0, pairs)
    i = enough[-1]
    values = (float(found[name][i]) for name in ("tau", "precision", "recall", "false_positive_rate"))
    return Threshold(*values, pairs)


def shuffled_pairs(states: Sequence[str], rng: np.random.Generator, n: int) -> list[tuple[str, str]]:
    """n pairs of different states, drawn without looking at how near they are."""
    different = sorted(set(states))
    require(len(different) >= 2, "calibration needs at least two different states")
    first = rng.integers(len(different), size=n)
    second = (first + 1 + rng.integers(len(different) - 1, size=n)) % len(different)
    return [(different[i], different[j]) for i, j in zip(first, second, strict=True)]


def retold(state: str, rng: np.random.Generator) -> str:
    """A state in other words with the same content, for pairs that should count: phrases exchanged, lists reordered."""
    text = state
    for old, new in PHRASES:
        if old in text and rng.random() < 0.7:
            text = text.replace(old, new)
    head, see, tail = text.partition("you see ")
    items = [item.removeprefix("and ") for item in tail.rstrip(".").split(", ")]
    if see and len(items) > 1 and "\n" not in tail:
        text = head + see + ", ".join(items[i] for i in rng.permutation(len(items))) + "."
    return text


PHRASES = (
    ("You arrive at", "You are now at"), ("You pick up the", "You take the"), ("You move the", "You put the"),
    ("Nothing happens.", "That does nothing."), ("In it, you see", "Inside it, you see"), ("You open the", "You have opened the"),
    ("is closed.", "is shut."),
)  # fmt: skip
