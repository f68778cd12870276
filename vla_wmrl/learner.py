"""One GRPO update: groups and their advantages in, one step of the optimiser out (arXiv 2402.03300; WMRL Eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_wmrl import grpo
from vla_wmrl.config import GrpoConfig
from vla_wmrl.policies.base import Batch, Trainable

MAX_HALVINGS = 8


class Learner:
    """The policy's optimiser and the GRPO update on it."""

    def __init__(self, policy: Trainable, cfg: GrpoConfig):
        self.policy, self.cfg = policy, cfg
        self.parameters = [p for _, p in policy.parameters_to_train()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, betas=(0.9, 0.95))
        copied = cfg.kl_beta > 0 and policy.without_adapter() is None
        self.reference: list[Tensor] | None = [p.detach().clone() for p in self.parameters] if copied else None
        self.updates = 0

    def update(self, rollouts: Sequence[Any], advantages: np.ndarray, valid: np.ndarray, n_rollouts: int) -> dict:
        """One update per epoch from R rollouts with advantages [R] (fusion factors included) and valid [R].

        rollouts: of the kind that the policy collates. Looks are its rows: of a language model, sampled tokens.

        n_rollouts: what the average over rollouts divides by. Returns metrics; with no advantage at all, no step is taken.
        Raises RatioMismatch when re-scoring does not reproduce itself before the first step.
        """
        looks = self.policy.collate(rollouts, advantages, valid)
        weights = grpo.look_weights(looks.rollout, looks.mask, n_rollouts)
        live = torch.nonzero(looks.mask).flatten()
        metrics = {"looks": float(len(live)), "looks_skipped": float(len(looks.mask) - len(live)), "skipped": 0.0}
        if len(live) == 0:
            return metrics | {"skipped": 1.0}
        parts = looks.split(live, self.cfg.minibatch_looks)
        with torch.no_grad():
            # Scored again under the update's own batch shapes: the sampler's batches round differently.
            old = [self.policy.log_prob(*looks.rows(part)) for part in parts]
            reference = self._reference_log_prob(looks, parts)
        for epoch in range(self.cfg.epochs):
            before = [p.detach().clone() for p in self.parameters]
            metrics |= self._epoch(looks, weights, parts, old, reference, first=epoch == 0)
            metrics |= self._shorten(looks, parts[epoch % len(parts)], old[epoch % len(parts)], before)
        self.updates += 1
        return metrics

    @torch.no_grad()
    def _shorten(self, looks: Batch, part: Tensor, old: Tensor, before: list[Tensor]) -> dict[str, float]:
        """Halves the step that was just taken until the policy moved by at most `target_kl` nats a look.

        A chunk's log-probability sums over dozens of precise elements, so a step that is small in the weights can be far
        outside the trust region, and with one epoch the clip never sees it (lr 2e-4 took a policy of 40 % to 0 in 14
        updates).
        """
        scale, after = 1.0, [p.detach().clone() for p in self.parameters]
        for halvings in range(MAX_HALVINGS + 1):
            log_r = grpo.log_ratio(self.policy.log_prob(*looks.rows(part)), old).clamp(-20, 20)
            kl = float((torch.expm1(log_r) - log_r).mean())  # k3 estimate of KL(old || new), from samples of old
            if self.cfg.target_kl is None or kl <= self.cfg.target_kl or halvings == MAX_HALVINGS:
                break
            scale *= 0.5
            self._lend([b + scale * (a - b) for a, b in zip(after, before, strict=True)])
        return {"kl_step": kl, "step_scale": scale}

    def _epoch(self, looks: Batch, weights: Tensor, parts: list[Tensor], old, reference, first: bool) -> dict:
        self.optimizer.zero_grad(set_to_none=True)
        cfg, collected = self.cfg, []
        for i, part in enumerate(parts):
            logp = self.policy.log_prob(*looks.rows(part))
            if first:
                grpo.check_first_ratio(grpo.log_ratio(logp, old[i]), tol=grpo.ratio_tolerance(self.policy.dtype))
            loss, part_metrics = grpo.grpo_loss(
                logp, old[i], looks.advantage[part], weights[part], eps_low=cfg.eps_low, eps_high=cfg.eps_high,
                dual_clip=cfg.dual_clip, logp_ref=None if reference is None else reference[i], kl_coef=cfg.kl_beta,
            )  # fmt: skip
            loss.backward()
            collected.append(part_metrics)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, cfg.grad_clip)
        self.optimizer.step()
        return grpo.merge_metrics(collected) | {"grad_norm": float(norm)}

    def _reference_log_prob(self, looks: Batch, parts: list[Tensor]) -> list[Tensor] | None:
        """Log-probabilities under the first policy: without the adapter, or with its weights lent to the network."""
        if self.cfg.kl_beta == 0:
            return None
        if self.reference is None:
            with self.policy.without_adapter():
                return [self.policy.log_prob(*looks.rows(part)) for part in parts]
        now = [p.detach().clone() for p in self.parameters]
        self._lend(self.reference)
        scored = [self.policy.log_prob(*looks.rows(part)) for part in parts]
        self._lend(now)
        return scored

    def _lend(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data.copy_(value)

    def state_dict(self) -> dict:
        """Trained weights, optimiser, counters; with the reference, if there is one."""
        names = [name for name, _ in self.policy.parameters_to_train()]
        state = {
            "weights": dict(zip(names, (p.detach().clone() for p in self.parameters), strict=True)),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }
        if self.reference is not None:
            state["reference"] = dict(zip(names, self.reference, strict=True))
        return state

    def load_state_dict(self, state: dict) -> None:
        names = [name for name, _ in self.policy.parameters_to_train()]
        self._lend([state["weights"][name] for name in names])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        if "reference" in state:
            self.reference = [state["reference"][name] for name in names]
