"""Statistics that results and diagnostics are reported with. Pure; scipy and scikit-learn inside.

Non-obvious behaviour: a statistic that the data cannot define (one class only, a constant) is NaN, never 0 or 0.5;
pairs with a NaN on either side are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats as st
from sklearn.metrics import roc_auc_score


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a success rate, as fractions; (0, 1) for n = 0 (Wilson 1927)."""
    if not 0 <= successes <= n:
        raise ValueError(f"wilson: {successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    interval = st.binomtest(int(successes), int(n)).proportion_ci(1.0 - 2.0 * st.norm.sf(z), method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar(a: np.ndarray, b: np.ndarray) -> float:
    """Exact two-sided p-value that paired outcomes a [n] and b [n] (bool) succeed equally often (McNemar 1947)."""
    a, b = _same_shape(np.asarray(a, bool), np.asarray(b, bool))
    only_a, only_b = int(np.sum(a & ~b)), int(np.sum(b & ~a))
    return float(st.binomtest(only_a, only_a + only_b, 0.5).pvalue) if only_a + only_b else 1.0


@dataclass(frozen=True)
class Difference:
    """mean(b) - mean(a), its bootstrap interval, and the bootstrap standard error."""

    value: float
    low: float
    high: float
    se: float


def paired_difference(
    a: np.ndarray,
    b: np.ndarray,
    task: np.ndarray,
    *,
    resample: str = "tasks",
    confidence: float = 0.95,
    n_boot: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Percentile-bootstrap interval of mean(b - a) over paired episodes [n] of tasks [n].

    resample="tasks" draws whole tasks (clusters): the claim extends to tasks like these; with fewer than about five
    tasks it is rough. resample="episodes" draws episodes inside each task: the claim is about these tasks.
    """
    a, b = _same_shape(np.asarray(a, np.float64), np.asarray(b, np.float64))
    delta, (_, cluster) = b - a, np.unique(np.asarray(task), return_inverse=True)
    if not len(delta):
        raise ValueError("paired_difference: no pairs")
    rng = np.random.default_rng(seed)
    counts = np.bincount(cluster)
    if resample == "tasks":
        sums = np.bincount(cluster, delta)
        times = rng.multinomial(len(counts), np.full(len(counts), 1.0 / len(counts)), size=n_boot)
        draws = times @ sums / (times @ counts)
    elif resample == "episodes":
        draws = np.zeros(n_boot)
        for c, n in enumerate(counts):
            draws += rng.multinomial(n, np.full(n, 1.0 / n), size=n_boot) @ delta[cluster == c]
        draws /= len(delta)
    else:
        raise ValueError(f"paired_difference: resample={resample!r}, expected 'tasks' or 'episodes'")
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Difference(float(delta.mean()), float(low), float(high), float(draws.std(ddof=1)))


def auc(scores: np.ndarray, outcome: np.ndarray) -> float:
    """Area under the ROC curve of scores [n] for outcome [n] (bool); NaN when only one class is there."""
    scores, outcome = _finite(scores, outcome)
    return float(roc_auc_score(outcome > 0.5, scores)) if 0 < np.sum(outcome > 0.5) < len(outcome) else float("nan")


def within_group_auc(scores: np.ndarray, outcome: np.ndarray, groups: np.ndarray) -> float:
    """AUC over (success, failure) pairs of the same group [n] only, all that a group baseline can use; NaN without."""
    scores, outcome, groups = _finite(scores, outcome, groups)
    concordant = total = 0.0
    for g in np.unique(groups):
        s, y = scores[groups == g], outcome[groups == g] > 0.5
        pairs = y.sum() * (~y).sum()
        if pairs:
            concordant += roc_auc_score(y, s) * pairs
            total += pairs
    return concordant / total if total else float("nan")


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman rank correlation of a [n] and b [n]; NaN when either is constant."""
    a, b = _finite(a, b)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(st.spearmanr(a, b).statistic)


def ece(predicted: np.ndarray, outcome: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error over equal-width bins of [0, 1]: sum of share * |mean predicted - mean outcome|."""
    predicted, outcome = _finite(predicted, outcome)
    if not len(predicted):
        return float("nan")
    index = np.clip((predicted * bins).astype(int), 0, bins - 1)
    gap = np.bincount(index, predicted - outcome, minlength=bins)
    return float(np.abs(gap).sum() / len(predicted))


def false_positive_rate(predicted: np.ndarray, outcome: np.ndarray, *, threshold: float, success: float) -> float:
    """Share of real failures (outcome < success) with predicted >= threshold; NaN without failures."""
    predicted, outcome = _finite(predicted, outcome)
    failed = outcome < success
    return float(np.mean(predicted[failed] >= threshold)) if failed.any() else float("nan")


def _same_shape(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired outcomes must be two [n] arrays, got {a.shape} and {b.shape}")
    return a, b


def _finite(a: np.ndarray, b: np.ndarray, *others: np.ndarray) -> tuple[np.ndarray, ...]:
    """The pairs with both numbers present."""
    a, b = _same_shape(np.asarray(a, np.float64), np.asarray(b, np.float64))
    keep = np.isfinite(a) & np.isfinite(b)
    return (a[keep], b[keep], *(np.asarray(o)[keep] for o in others))
