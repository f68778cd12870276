"""Fusing two gradient streams: anchors graded for real, other groups by the calibrated world model (WMRL Eq. 5).

    g = (w_E sum_E g_i + w_WM sum_WM g_i) / (w_E |G_E| + w_WM |G_WM|),    w = 1 / V

The batch loss averages m = |G_E| + |G_WM| groups, so the factors that turn group advantages into this g are
w_E m / (w_E |G_E| + w_WM |G_WM|) and the same with w_WM: their mean over the batch's groups is 1 and the step size does
not inflate. Kinds, with V_E = 1 and f, r the calibrated and real rewards of anchors, centred in their group:

* none: factors 1.
* inverse_variance: V_WM = 1 + s^2, s^2 = E[(f - r)^2] / E[r^2]. Eq. 5 without a free parameter (methods.md 2.3, c = 1).
* released: the authors' code (methods.md 2.3). clip(1 + c s^2, 1, 4) on anchors, no denominator, c set once.
* mse: as inverse_variance, but the part of the residual that is a bias does not average out over groups, so
  V_WM = 1 + (s^2 - b^2) + |G_WM| b^2 with b^2 = (E[f r] - E[f^2])^2 / (E[f^2] E[r^2]).
* reliability: w_WM / w_E = R^2 = E[f r]^2 / (E[f^2] E[r^2]), both streams with the same factor. A calibrated
  f = E[r | r_wm] is r shrunk by R^2; the unbiased f / R^2 has V_WM = 1 / R^2, and R^2 (f / R^2) = f. Where 1 + s^2
  is at most 2 for a calibrated f, this one goes over into plain GRPO on the anchors as the world model fails.
* ppi: g = lam mean_WM g(f) + mean_E [g(r) - lam g(f)], unbiased for any f (2301.09633, 2311.01453), with
  lam = E[f r] / ((1 + |G_E| / |G_WM|) E[f^2]) clipped to [0, 1].

Non-obvious behaviour
* Statistics are ratios of running means over *all* anchor groups, those without contrast in r too: a world model that
  sees contrast where there is none is charged for it. Only "released" skips them, as the authors do.
* f must come from a calibration fitted without these pairs: `debias.transform` before `debias.observe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import norm, rankdata

from vla_wmrl import stats

KINDS = ("none", "inverse_variance", "released", "mse", "reliability", "ppi")


class Weights(NamedTuple):
    """Factors on advantages: anchors' A(r_env), imagined groups' A(f), anchors' twins' A(f) (only "ppi").

    Where a twin is a rollout of its own (imagined with the same noise keys) it is one more row with advantage twin *
    A(f); where the world model scored the very rollout that ran, that rollout has anchor * A(r_env) + twin * A(f). The
    first form needs `look_weights(..., n_rollouts)` without the twins, and its variance falls only as far as twins
    follow the real rollouts.
    """

    anchor: float
    wm: float
    twin: float = 0.0


@dataclass(frozen=True)
class Guard:
    """When paired anchors show the world model useless: both tests use a confidence bound, not the point estimate.

    Rank correlation: of ranks within groups, pooled; its upper `confidence` bound (bootstrap over groups) below
    `min_rank_correlation`. False positives: share of real failures (r < success) with f >= threshold; its lower Wilson
    bound above `max_false_positives`. `threshold` None is the median f of real successes, so that neither base rate nor
    calibration moves it (chance is then 0.5).
    """

    min_pairs: int = 64
    min_groups: int = 8  # with contrast in r, for the rank test
    min_rank_correlation: float = 0.2
    max_false_positives: float = 0.4
    threshold: float | None = None
    success: float = 0.5
    confidence: float = 0.95

    def useless(self, f: np.ndarray, r_env: np.ndarray, groups: np.ndarray) -> str:
        """Why the world model should be ignored, from pairs [n] of anchor groups [n]; "" when nothing says so."""
        keep = np.isfinite(f) & np.isfinite(r_env)
        f, r_env, groups = f[keep], r_env[keep], groups[keep]
        if len(f) < self.min_pairs:
            return ""
        corr, upper, contrast = _rank_correlation_bound(f, r_env, groups, self.confidence)
        if contrast >= self.min_groups and upper < self.min_rank_correlation:
            bound = f"at most {upper:.2f} < {self.min_rank_correlation}"
            return f"rank correlation with {contrast} real groups is {corr:.2f}, {bound}"
        succeeded = r_env >= self.success
        n_failed = int(np.sum(~succeeded))
        if min(n_failed, int(succeeded.sum())) >= self.min_groups:
            threshold = float(np.median(f[succeeded])) if self.threshold is None else self.threshold
            false = int(np.sum(f[~succeeded] >= threshold))
            lower, _ = stats.wilson(false, n_failed, z=float(norm.ppf(self.confidence)))
            if lower > self.max_false_positives:
                bound = f"at least {lower:.2f} > {self.max_false_positives}"
                return f"{false} of {n_failed} real failures score {threshold:.3g} or more: {bound}"
        return ""


class Fusion:
    """Running residual statistics of the anchors, and the factors they give. Fitted: names ending in `_`."""

    TARGET, RHO, WARMUP, W_MAX, MIN_VAR = 2.0, 1.0, 32, 4.0, 1e-9  # "released" (methods.md 2.3)

    def __init__(
        self,
        kind: str = "inverse_variance",
        *,
        half_life_groups: float = 64.0,
        min_groups: int = 4,
        max_weight: float | None = None,
        guard: Guard | None = None,
        guard_window: int = 64,
    ):
        """half_life_groups: of the running means. min_groups: anchor groups seen before weights leave 1. max_weight:
        bound of w_E / w_WM ("inverse_variance", "mse"; Eq. 5 needs none, and None is none). guard_window: latest
        anchor groups that the guard sees.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}, expected one of {KINDS}")
        self.kind, self.min_groups = kind, min_groups
        self.max_weight = np.inf if max_weight is None else max_weight
        self.guard, self.guard_window = guard, guard_window
        self.rate = 1.0 - 0.5 ** (1.0 / half_life_groups)
        self.n_groups_ = 0
        self.moments_ = np.zeros(4)  # running sums of E[(f - r)^2], E[r^2], E[f r], E[f^2], before bias correction
        self.released_ = np.zeros(3)  # running s^2, groups in it, c (0: not set)
        self.recent_ = np.empty((0, 3))  # (group, f, r) of the guard's window
        self.reason_ = ""

    @property
    def twins(self) -> bool:
        """Whether anchors' twins enter the gradient (their advantages need `weights().twin`)."""
        return self.kind == "ppi"

    def observe(self, f: np.ndarray, r_env: np.ndarray, valid: np.ndarray | None = None) -> None:
        """Anchors' out-of-fold calibrated rewards f [M, G] and real ones r_env [M, G]; NaN or not `valid`: absent."""
        f, r_env = np.asarray(f, np.float64), np.asarray(r_env, np.float64)
        present = np.isfinite(f) & np.isfinite(r_env) & (True if valid is None else np.asarray(valid, bool))
        for f_g, r_g, valid_g in zip(f, r_env, present, strict=True):
            if valid_g.sum() >= 2:
                self._observe_group(f_g[valid_g], r_g[valid_g])
        if self.guard is not None:
            self.reason_ = self.guard.useless(self.recent_[:, 1], self.recent_[:, 2], self.recent_[:, 0])

    def weights(self, n_anchor: int, n_wm: int, wm_ok: bool = True) -> Weights:
        """Factors on group advantages, for a loss that averages n_anchor real and n_wm imagined groups.

        With `wm_ok` False (the calibration is not ready), or a guard that fired, the imagined groups get 0 and the
        anchors the full step: plain GRPO. Without anchors the world model stands alone: (1, 1), or 0 if it must not be
        used.
        """
        m = n_anchor + n_wm
        if self.reason_ or not wm_ok:
            return Weights(m / n_anchor if n_anchor else 0.0, 0.0)
        if n_anchor == 0 or n_wm == 0 or self.kind == "none":
            return Weights(1.0, 1.0)
        if self.kind == "released":
            return Weights(self.released_weight, 1.0)
        if self.kind == "ppi":
            lam = self._lam(n_anchor, n_wm)
            return Weights(m / n_anchor, lam * m / n_wm, 0.0 - lam * m / n_anchor)
        w_wm = self._wm_weight(n_wm)
        unit = m / (n_anchor + w_wm * n_wm)  # Eq. 5 with w_E = 1
        return Weights(unit, unit if self.kind == "reliability" else w_wm * unit)

    @property
    def released_weight(self) -> float:
        """clip(1 + c s^2, 1, 4); 1 until c is set."""
        s2, _, c = self.released_
        return float(np.clip(1.0 + c * s2, 1.0, self.W_MAX))

    def statistics(self) -> dict[str, float]:
        """Running s2, bias2 (b^2), r2 (R^2), lam0 (E[f r] / E[f^2]), groups seen, whether the guard fired."""
        s2, bias2, r2, lam0 = self._ratios()
        return {
            "s2": s2,
            "bias2": bias2,
            "r2": r2,
            "lam0": lam0,
            "groups": float(self.n_groups_),
            "guard": float(bool(self.reason_)),
        }

    def state_dict(self) -> dict[str, np.ndarray | float | int | str]:
        """Everything fitted; loading it reproduces `weights` bit for bit."""
        return {
            "n_groups": self.n_groups_,
            "moments": self.moments_.copy(),
            "released": self.released_.copy(),
            "recent": self.recent_.copy(),
            "reason": self.reason_,
        }

    def load_state_dict(self, state: dict[str, np.ndarray | float | int | str]) -> None:
        """The inverse of `state_dict`; lists in place of arrays (JSON) are fine."""
        self.n_groups_, self.reason_ = int(state["n_groups"]), str(state["reason"])
        self.moments_ = np.array(state["moments"], np.float64)
        self.released_ = np.array(state["released"], np.float64)
        self.recent_ = np.array(state["recent"], np.float64).reshape(-1, 3)

    def _observe_group(self, f: np.ndarray, r: np.ndarray) -> None:
        pairs = np.column_stack([np.full(len(f), float(self.n_groups_)), f, r])
        self.recent_ = np.concatenate([self.recent_, pairs])
        self.recent_ = self.recent_[self.recent_[:, 0] > self.n_groups_ - self.guard_window]
        self.n_groups_ += 1
        f, r = f - f.mean(), r - r.mean()
        moments = np.array([np.mean((f - r) ** 2), np.mean(r**2), np.mean(f * r), np.mean(f**2)])
        self.moments_ += self.rate * (moments - self.moments_)
        if moments[1] >= self.MIN_VAR:
            s2, n, c = self.released_
            ratio = moments[0] / moments[1]
            s2, n = (ratio if n == 0 else s2 + self.rate * (ratio - s2)), n + 1
            if c == 0.0 and n >= self.WARMUP and s2 * self.RHO > 1e-12:
                c = (self.TARGET - 1.0) / (s2 * self.RHO)
            self.released_ = np.array([s2, n, c])

    def _ratios(self) -> tuple[float, float, float, float]:
        """s^2, b^2, R^2 and E[f r] / E[f^2]; ratios, so the running means' start-up bias 1 - (1 - rate)^n cancels."""
        residual, var_r, cov, var_f = self.moments_
        s2 = min(residual / max(var_r, 1e-300), 1e6)  # bounded: contrast in f alone must give weight ~0, not infinity
        bias2 = (cov - var_f) ** 2 / (var_f * var_r) if var_f * var_r > 0 else 0.0
        r2 = max(cov, 0.0) ** 2 / (var_f * var_r) if var_f * var_r > 0 else 0.0
        return float(s2), float(bias2), float(r2), float(cov / var_f) if var_f > 0 else 0.0

    def _wm_weight(self, n_wm: int) -> float:
        """w_WM / w_E = V_E / V_WM; 1 until `min_groups` anchor groups have been seen."""
        if self.n_groups_ < self.min_groups:
            return 1.0
        s2, bias2, r2, _ = self._ratios()
        if self.kind == "reliability":
            return r2
        v_wm = 1.0 + (s2 if self.kind == "inverse_variance" else max(s2 - bias2, 0.0) + n_wm * bias2)
        return 1.0 / min(v_wm, self.max_weight)

    def _lam(self, n_anchor: int, n_wm: int) -> float:
        if self.n_groups_ < self.min_groups:
            return 0.0  # unbiased, and no evidence yet that f helps
        return float(np.clip(self._ratios()[3] / (1.0 + n_anchor / n_wm), 0.0, 1.0))


def _rank_correlation_bound(f: np.ndarray, r: np.ndarray, groups: np.ndarray, confidence: float) -> tuple[float, float, int]:
    """Pooled within-group rank correlation over groups with contrast in r, its upper bound, and their number."""
    sums = []
    for g in np.unique(groups):
        f_g, r_g = rankdata(f[groups == g]), rankdata(r[groups == g])
        f_g, r_g = f_g - f_g.mean(), r_g - r_g.mean()
        if np.any(r_g):
            sums.append((f_g @ r_g, f_g @ f_g, r_g @ r_g))
    if not sums:
        return 0.0, 1.0, 0
    sums = np.array(sums)
    times = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1.0 / len(sums)), size=1000)
    draws = _correlation(times @ sums)
    return float(_correlation(sums.sum(axis=0))), float(np.quantile(draws, confidence)), len(sums)


def _correlation(sums: np.ndarray) -> np.ndarray:
    xy, xx, yy = np.moveaxis(sums, -1, 0)
    return xy / np.sqrt(np.maximum(xx * yy, 1e-300))
