"""The GRPO objective on log-probabilities of looks; every rollout counts equally, however long.

A row is one look (or one token, for token policies). Every reduction is a sum of weight * term with weights that were
computed once for the whole batch, never a mean over a minibatch: so any split of the batch accumulates to the same
gradient, and masked rows change nothing. Sources: PPO 1707.06347, GRPO 2402.03300, clip-higher (DAPO) 2503.14476, dual
clip 1912.09729, KL estimators (Schulman 2020).

Non-obvious behaviour
* Metrics are weighted sums too: those of minibatches add up (`merge_metrics`).
* Rows of weight 0 may hold NaN: they are replaced before any arithmetic, so that neither value nor gradient leaks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # exp() of more is no longer an importance weight but an overflow


class RatioMismatch(RuntimeError):
    """Re-scoring does not reproduce the sampler's log-probabilities: training on such ratios is training on noise."""


def log_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """log pi_new - log pi_old [B] in float32 or better; logp_old carries no gradient."""
    dtype = torch.promote_types(torch.promote_types(logp.dtype, logp_old.dtype), torch.float32)
    return logp.to(dtype) - logp_old.detach().to(dtype)


def clipped_objective(
    ratio: Tensor, advantages: Tensor, eps_low: float = 0.2, eps_high: float = 0.28, dual_clip: float | None = None
) -> Tensor:
    """min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A) [B], to be maximised.

    `dual_clip` = c > 1 also bounds it from below by c A where A < 0, so that one runaway ratio cannot dominate.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip}: it must be above 1")
    objective = torch.minimum(ratio * advantages, ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages)
    if dual_clip is None:
        return objective
    return torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)


def kl_estimate(logp: Tensor, logp_ref: Tensor, kind: str = "k3") -> Tensor:
    """Per-row estimate [B] of KL(pi || pi_ref) from samples of pi, with l = log pi_ref - log pi.

    k1 = -l (unbiased, any sign), k2 = l^2 / 2 (its gradient is that of the KL), k3 = exp(l) - l - 1 (unbiased, >= 0).
    """
    ref_over_pi = -log_ratio(logp, logp_ref)
    if kind == "k1":
        return -ref_over_pi
    if kind == "k2":
        return 0.5 * ref_over_pi.square()
    if kind == "k3":
        bounded = ref_over_pi.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return torch.expm1(bounded) - bounded
    raise ValueError(f"KL estimator {kind!r}, expected 'k1', 'k2' or 'k3'")


def look_weights(rollout: Tensor, mask: Tensor, n_rollouts: int | None = None) -> Tensor:
    """Weights [B] float64 of a batch's looks: 1 / n_rollouts a rollout, shared equally by its unmasked looks.

    rollout [B] int64 says which rollout a look belongs to (any ids), mask [B] bool which looks count. n_rollouts
    defaults to the number of rollouts with an unmasked look; pass it when more rows than the counted rollouts are in
    the batch (PPI's twins). Compute it once for the whole batch, then index it by minibatch.
    """
    mask = mask.bool()
    _, index = torch.unique(rollout, return_inverse=True)
    looks = torch.bincount(index, weights=mask.double())
    if n_rollouts is None:
        n_rollouts = int((looks > 0).sum())
    share = 1.0 / (looks.clamp(min=1.0) * max(n_rollouts, 1))
    return torch.where(mask, share[index], torch.zeros_like(share[index]))


def check_first_ratio(log_ratio: Tensor, mask: Tensor | None = None, tol: float = 1e-5) -> float:
    """Largest |log ratio| over [B] (of masked-in rows); raises RatioMismatch above `tol` or when not finite.

    Before the first update the policy that re-scores is the one that sampled. tol: `ratio_tolerance` of its dtype.
    """
    rows = log_ratio.detach() if mask is None else log_ratio.detach()[mask.bool()]
    if not rows.numel():
        return 0.0
    worst = rows.abs().max().item() if bool(torch.isfinite(rows).all()) else float("nan")
    if not worst <= tol:
        raise RatioMismatch(
            f"first-update |log ratio| is {worst:.3g} (allowed {tol:.1g}): log-probabilities were recomputed "
            "under other conditions than sampled (dtype, batch shape, dropout, noise, mask): recompute the old ones too"
        )
    return worst


def ratio_tolerance(dtype: torch.dtype) -> float:
    """What `check_first_ratio` allows a network that computes in `dtype`: 1e-5 in float32, 1e-2 in 16 bits."""
    return 1e-5 if torch.finfo(dtype).bits >= 32 else 1e-2


def grpo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
    logp_ref: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
) -> tuple[Tensor, dict[str, float]]:
    """Loss = -sum_b weights_b (clipped objective_b - kl_coef KL_b), and its metrics; all inputs are [B].

    advantages already carry the fusion's factors; weights are `look_weights` of the whole batch, indexed to these rows.
    """
    live = weights > 0
    log_r = _fill(log_ratio(logp, logp_old), live)
    ratio = log_r.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    weights, advantages = weights.to(ratio.dtype), _fill(advantages.to(ratio.dtype), live)
    loss = -(weights * clipped_objective(ratio, advantages, eps_low, eps_high, dual_clip)).sum()
    kl_ref = torch.zeros((), dtype=ratio.dtype, device=ratio.device)
    if logp_ref is not None:
        kl_ref = (weights * kl_estimate(_fill(logp, live), _fill(logp_ref, live), kl_kind)).sum()
        loss = loss + kl_coef * kl_ref

    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > 1.0 + eps_high)) | ((advantages < 0) & (ratio < 1.0 - eps_low))
        metrics = {
            "loss": loss.item(),
            "weight": weights.sum().item(),
            "clip_frac": (weights * clipped).sum().item(),
            "approx_kl": (weights * (torch.expm1(log_r.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)) - log_r)).sum().item(),
            "kl_ref": kl_ref.item(),
            "ratio_mean": (weights * ratio).sum().item(),
            "ratio_max": ratio[live].max().item() if live.any() else 1.0,
            "log_ratio_abs_max": log_r.abs().max().item() if len(log_r) else 0.0,
        }
    return loss, metrics


def merge_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a batch from those of its minibatches: weighted sums add, `*_max` takes the maximum."""
    return {key: (max if key.endswith("_max") else sum)(part[key] for part in parts) for key in parts[0]}


def _fill(values: Tensor, live: Tensor) -> Tensor:
    return torch.where(live, values, torch.zeros_like(values))
