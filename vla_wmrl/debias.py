"""Online debiasing: a monotone map f from world-model to expected real rewards, learned from anchors (WMRL 3.3).

Affine maps of a reward are cancelled by the group baseline (up to scale); a monotone map that is not affine is not, and
it cannot reorder a group. Two forms:

* "isotonic" (default): pool-adjacent-violators on the raw pairs, as a function of the score's *rank*, so that
  f(h(r_wm)) is the same for every strictly increasing h. Then f is shrunk towards the base rate by its own out-of-fold,
  within-group slope: few pairs or a world model without insight give slope 0, hence no gradient.
* "released": the authors' code (methods.md 2.2), 10 equal-width bins on [0, 1], weighted PAV, linear interpolation.

Non-obvious behaviour
* f is the identity until `min_pairs` pairs have been seen; `ready` says so, and the caller decides what to do.
* A pair never calibrates itself: call `transform` on a step's rewards before `observe` on its pairs.
* NaN goes in, NaN comes out: a missing reward stays missing. Pairs with a NaN are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.isotonic import isotonic_regression

from vla_wmrl import stats

FORMS = ("isotonic", "released")


@dataclass(frozen=True)
class Curve:
    """A fitted monotone map: interpolates (x, y) at the score, or at its rank in `reference` [n] if that is given."""

    x: np.ndarray
    y: np.ndarray
    reference: np.ndarray

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        return np.interp(_rank(self.reference, scores) if len(self.reference) else scores, self.x, self.y)


def fit_isotonic(scores: np.ndarray, rewards: np.ndarray) -> Curve:
    """Isotonic regression of rewards [n] on the ranks of scores [n]; equal scores are one point."""
    points, index, count = np.unique(scores, return_inverse=True, return_counts=True)
    value = isotonic_regression(np.bincount(index, rewards) / count, sample_weight=count)
    reference = np.sort(scores)
    return Curve(_rank(reference, points), value, reference)


def fit_binned(scores: np.ndarray, rewards: np.ndarray, bins: int = 10) -> Curve | None:
    """Bucketed isotonic regression on [0, 1] (released wmrl/debias.py); None when fewer than two bins are populated."""
    edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    _, index, count = np.unique(np.digitize(scores, edges), return_inverse=True, return_counts=True)
    if len(count) < 2:
        return None
    value = isotonic_regression(np.bincount(index, rewards) / count, sample_weight=count)
    return Curve(np.bincount(index, scores) / count, value, np.empty(0))


class IsotonicDebiaser:
    """Calibration of world-model rewards, refitted as anchor pairs arrive. Fitted: `curves_`, `base_`, `slope_`."""

    def __init__(
        self,
        form: str = "isotonic",
        *,
        min_pairs: int = 40,
        refit_every: int = 1,
        max_pairs: int = 2000,
        shrink: bool = True,
        task_strength: float | None = None,
        folds: int = 5,
    ):
        """min_pairs: identity below it. refit_every: new pairs before a refit. max_pairs: kept, oldest dropped first.

        shrink: multiply deviations from the base rate by the out-of-fold within-group slope. task_strength: None pools
        all tasks; k lets task t have its own curve with weight n_t / (n_t + k). folds: of the cross-fitting, over
        groups.
        """
        if form not in FORMS:
            raise ValueError(f"form={form!r}, expected one of {FORMS}")
        self.form, self.min_pairs, self.refit_every, self.max_pairs = form, min_pairs, refit_every, max_pairs
        self.shrink, self.task_strength, self.folds = shrink, task_strength, folds
        self.pairs_, self.groups_, self.tasks_ = np.empty((0, 2)), np.empty(0, np.int64), np.empty(0, np.int64)
        self.since_fit_ = 0
        self.curves_: dict[int, tuple[float, Curve]] = {}  # task (-1: all of them) -> (mixing weight, curve)
        self.base_, self.slope_ = 0.0, 1.0

    @classmethod
    def released(cls) -> IsotonicDebiaser:
        """The authors' constants (methods.md 2.2): identity until 200 pairs, a refit every 64, 5000 pairs kept."""
        return cls("released", min_pairs=200, refit_every=64, max_pairs=5000, shrink=False)

    @property
    def ready(self) -> bool:
        """Whether `transform` is a fitted map rather than the identity."""
        return bool(self.curves_)

    def transform(self, r_wm: np.ndarray, tasks: np.ndarray | None = None) -> np.ndarray:
        """Calibrated rewards, same shape as r_wm (any), float64; NaN where r_wm is NaN. tasks broadcasts to r_wm."""
        r_wm = np.asarray(r_wm, np.float64)
        if not self.ready:
            return r_wm.copy()
        calibrated = self.base_ + self.slope_ * (_predict(self.curves_, r_wm, tasks) - self.base_)
        return np.where(np.isnan(r_wm), np.nan, calibrated)

    def observe(self, pairs: np.ndarray, groups: np.ndarray, tasks: np.ndarray | None = None) -> None:
        """Add pairs [n, 2] of (r_wm, r_env) from groups [n] (ids unique in the run) of tasks [n]; refit when due."""
        pairs, groups, tasks = _clean(pairs, groups, tasks)
        self.pairs_ = np.concatenate([self.pairs_, pairs])[-self.max_pairs :]
        self.groups_ = np.concatenate([self.groups_, groups])[-self.max_pairs :]
        self.tasks_ = np.concatenate([self.tasks_, tasks])[-self.max_pairs :]
        self.since_fit_ += len(pairs)
        if len(self.pairs_) >= self.min_pairs and self.since_fit_ >= self.refit_every:
            self._refit()

    def fit(self, pairs: np.ndarray, groups: np.ndarray, tasks: np.ndarray | None = None) -> IsotonicDebiaser:
        """Forget everything and fit on these pairs [n, 2] now, however few."""
        pairs, groups, tasks = _clean(pairs, groups, tasks)
        if not len(pairs):
            raise ValueError("fit: no pair has both rewards")
        self.pairs_, self.groups_, self.tasks_ = (
            pairs[-self.max_pairs :],
            groups[-self.max_pairs :],
            tasks[-self.max_pairs :],
        )
        self.curves_ = {}
        self._refit()
        return self

    def out_of_fold(self, pairs: np.ndarray, groups: np.ndarray, tasks: np.ndarray | None = None) -> np.ndarray:
        """f(r_wm) [n] for pairs [n, 2], each from a fit on *other* groups' pairs.

        NaN for pairs with a NaN, or when there are no other groups. For diagnostics, and to prime the fusion; in the
        loop, `transform` before `observe` is out of fold already.
        """
        pairs, groups, tasks = np.asarray(pairs, np.float64), np.asarray(groups), _tasks(tasks, len(pairs))
        keep = np.isfinite(pairs).all(axis=1)
        result = np.full(len(pairs), np.nan)
        result[keep] = self._cross_fit(pairs[keep], groups[keep], tasks[keep], self.shrink)
        return result

    def diagnostics(self, *, threshold: float = 0.5, success: float = 0.5) -> dict[str, float]:
        """`report` of the kept pairs, raw ("before_") and calibrated out of fold ("after_"), and what that gained."""
        r_wm, r_env = self.pairs_.T
        before = report(r_wm, r_env, self.groups_, threshold=threshold, success=success)
        after = report(
            self.out_of_fold(self.pairs_, self.groups_, self.tasks_),
            r_env,
            self.groups_,
            threshold=threshold,
            success=success,
        )
        figures = {f"before_{k}": v for k, v in before.items()} | {f"after_{k}": v for k, v in after.items()}
        reduction = 1.0 - after["within_mse"] / before["within_mse"] if before["within_mse"] else float("nan")
        return figures | {"pairs": float(len(self.pairs_)), "slope": self.slope_, "residual_reduction": reduction}

    def state_dict(self) -> dict[str, np.ndarray | float | int]:
        """Everything fitted, as arrays and numbers; loading it reproduces `transform` bit for bit."""
        state = {"pairs": self.pairs_.copy(), "groups": self.groups_.copy(), "tasks": self.tasks_.copy()}
        state |= {"since_fit": self.since_fit_, "base": self.base_, "slope": self.slope_}
        state["curve_tasks"] = np.array(list(self.curves_), np.int64)
        state["curve_weights"] = np.array([weight for weight, _ in self.curves_.values()], np.float64)
        for i, (_, curve) in enumerate(self.curves_.values()):
            state |= {f"curve_{i}_x": curve.x, f"curve_{i}_y": curve.y, f"curve_{i}_reference": curve.reference}
        return state

    def load_state_dict(self, state: dict[str, np.ndarray | float | int]) -> None:
        """The inverse of `state_dict`; lists in place of arrays (JSON) are fine."""
        self.pairs_ = np.asarray(state["pairs"], np.float64).reshape(-1, 2)
        self.groups_, self.tasks_ = (np.asarray(state[k], np.int64) for k in ("groups", "tasks"))
        self.since_fit_, self.base_, self.slope_ = int(state["since_fit"]), float(state["base"]), float(state["slope"])
        self.curves_ = {
            int(task): (
                float(weight),
                Curve(*(np.asarray(state[f"curve_{i}_{k}"], np.float64) for k in ("x", "y", "reference"))),
            )
            for i, (task, weight) in enumerate(zip(state["curve_tasks"], state["curve_weights"], strict=True))
        }

    def _refit(self) -> None:
        curves = self._fit_curves(self.pairs_, self.tasks_)
        if curves:  # the released form keeps its last map when fewer than two bins are populated
            self.curves_ = curves
            self.base_ = float(self.pairs_[:, 1].mean())
            self.slope_ = self._slope(self.pairs_, self.groups_, self.tasks_) if self.shrink else 1.0
        self.since_fit_ = 0

    def _fit_curves(self, pairs: np.ndarray, tasks: np.ndarray) -> dict[int, tuple[float, Curve]]:
        fit = fit_isotonic if self.form == "isotonic" else fit_binned
        curves = {-1: (1.0, fit(*pairs.T))}
        if self.task_strength is not None:
            for task in np.unique(tasks):
                own = pairs[tasks == task]
                curves[int(task)] = (len(own) / (len(own) + self.task_strength), fit(*own.T))
        return {task: (weight, curve) for task, (weight, curve) in curves.items() if curve is not None}

    def _cross_fit(self, pairs: np.ndarray, groups: np.ndarray, tasks: np.ndarray, shrink: bool) -> np.ndarray:
        """Predictions [n], each from the folds that do not hold its group; NaN when there is one group only."""
        _, index = np.unique(groups, return_inverse=True)
        fold = index % self.folds
        result = np.full(len(pairs), np.nan)
        for k in np.unique(fold):
            held, rest = fold == k, fold != k
            curves = self._fit_curves(pairs[rest], tasks[rest]) if rest.any() else {}
            if curves:
                result[held] = _predict(curves, pairs[held, 0], tasks[held])
                if shrink:
                    base = pairs[rest, 1].mean()
                    result[held] = base + self._slope(pairs[rest], groups[rest], tasks[rest]) * (result[held] - base)
        return result

    def _slope(self, pairs: np.ndarray, groups: np.ndarray, tasks: np.ndarray) -> float:
        """Slope in [0, 1] of real on out-of-fold calibrated rewards, both centred within their group.

        PAV fits noise: on a world model without insight it still spreads its values (by ~ln(n)/n of the rewards'
        variance), and scores that only tell easy starts from hard ones say nothing inside a group. This slope is the
        cure for both. 1 where the pairs cannot tell: fewer than two groups, or no group with two pairs.
        """
        if not 2 <= len(np.unique(groups)) < len(groups):
            return 1.0
        predicted = self._cross_fit(pairs, groups, tasks, shrink=False)
        f, r = _centred(predicted, groups), _centred(pairs[:, 1], groups)
        spread = float(np.nansum(f * f))
        return float(np.clip(np.nansum(f * r) / spread, 0.0, 1.0)) if spread > 0.0 else 0.0


def report(
    predicted: np.ndarray, r_env: np.ndarray, groups: np.ndarray, *, threshold: float, success: float
) -> dict[str, float]:
    """How predicted rewards [n] meet real ones [n].

    bias: mean(predicted - r_env). within_mse: mean square of that after centring in each group, all that a group
    baseline sees. A predicted reward >= `threshold` counts as a predicted success, a real one >= `success` as a
    success.
    """
    predicted, r_env, groups = (np.asarray(a) for a in (predicted, r_env, groups))
    keep = np.isfinite(predicted) & np.isfinite(r_env)
    predicted, r_env, groups = predicted[keep], r_env[keep], groups[keep]
    error, succeeded = predicted - r_env, r_env >= success
    return {
        "bias": float(error.mean()) if len(error) else float("nan"),
        "within_mse": float(np.mean(_centred(error, groups) ** 2)) if len(error) else float("nan"),
        "ece": stats.ece(predicted, r_env),
        "spearman": stats.spearman(predicted, r_env),
        "auc": stats.auc(predicted, succeeded),
        "within_group_auc": stats.within_group_auc(predicted, succeeded, groups),
        "false_positive_rate": stats.false_positive_rate(predicted, r_env, threshold=threshold, success=success),
    }


def _rank(reference: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Mid-rank in [0, 1] of scores among sorted reference [n]: the same for any strictly increasing map of both."""
    below, upto = np.searchsorted(reference, scores, "left"), np.searchsorted(reference, scores, "right")
    return (below + upto) / (2.0 * len(reference))


def _predict(curves: dict[int, tuple[float, Curve]], scores: np.ndarray, tasks: np.ndarray | None) -> np.ndarray:
    """Pooled curve, moved towards the task's own by its mixing weight (a mix of monotone maps is monotone)."""
    pooled = curves[-1][1](scores)
    if tasks is None or len(curves) == 1:
        return pooled
    tasks = np.broadcast_to(tasks, np.shape(scores))
    for task, (weight, curve) in curves.items():
        if task >= 0:
            pooled = np.where(tasks == task, (1.0 - weight) * pooled + weight * curve(scores), pooled)
    return pooled


def _centred(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    _, index, count = np.unique(groups, return_inverse=True, return_counts=True)
    return values - (np.bincount(index, values) / count)[index]


def _tasks(tasks: np.ndarray | None, n: int) -> np.ndarray:
    return np.zeros(n, np.int64) if tasks is None else np.asarray(tasks, np.int64)


def _clean(pairs: np.ndarray, groups: np.ndarray, tasks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs with both rewards present, and their groups and tasks."""
    pairs, groups = np.asarray(pairs, np.float64).reshape(-1, 2), np.asarray(groups, np.int64)
    tasks = _tasks(tasks, len(pairs))
    if not len(pairs) == len(groups) == len(tasks):
        raise ValueError(f"pairs, groups and tasks must be as long: {len(pairs)}, {len(groups)}, {len(tasks)}")
    keep = np.isfinite(pairs).all(axis=1)
    return pairs[keep], groups[keep], tasks[keep]
