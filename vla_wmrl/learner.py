"""One GRPO update: groups and their advantages in, one step of the optimiser out (arXiv 2402.03300; WMRL Eq. 5)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_wmrl import grpo
from vla_wmrl.config import GrpoConfig
from vla_wmrl.errors import UserError
from vla_wmrl.policies.base import Batch, Trainable

MAX_HALVINGS = 8


@contextmanager
def all_cores() -> Iterator[None]:
    """Every core for the block, while the simulators wait; a limit that the user set (OMP_NUM_THREADS) stays."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Scored:
    """A batch as an update sees it: rows that carry gradient in parts, what the policy says of them before."""

    looks: Batch
    weights: Tensor  # [B]
    parts: list[Tensor]  # rows
    old: list[Tensor]  # log-probabilities of the parts under the policy that sampled them
    now: list[Tensor]  # and under the policy before the update, the same one unless rows are late
    late: list[Tensor] | None  # [b] bool, rows that an earlier policy sampled
    reference: list[Tensor] | None  # and under the first policy
    anywhere: list[Tensor]  # rows on which change is penalised, in parts
    centres: list[Tensor]  # where the policy's distributions lay there


class Learner:
    """The policy's optimiser and the GRPO update on it."""

    def __init__(self, policy: Trainable, cfg: GrpoConfig):
        if cfg.kl_old > 0 and not hasattr(policy, "centre"):
            raise UserError(
                f"grpo.kl_old={cfg.kl_old} needs a policy with a continuous centre; a {type(policy).__name__} has none"
            )
        self.policy, self.cfg = policy, cfg
        self.parameters = [p for _, p in policy.parameters_to_train()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, betas=(0.9, 0.95))
        copied = cfg.kl_beta > 0 and policy.without_adapter() is None
        self.reference: list[Tensor] | None = [p.detach().clone() for p in self.parameters] if copied else None
        self.updates = 0

    def update(
        self, rollouts: Sequence[Any], advantages: np.ndarray, valid: np.ndarray, n_rollouts: int,
        behaviour: tuple[Sequence[Tensor], np.ndarray] | None = None,
    ) -> dict:  # fmt: skip
        """One update per epoch from R rollouts with advantages [R] (fusion factors included) and valid [R].

        advantages: with `Loop.credit`, R arrays of one value a turn, for policies whose `collate` takes them.

        rollouts: of the kind that the policy collates; "looks" are its rows, of a language model sampled tokens.
        n_rollouts: what the average over rollouts divides by.
        behaviour: weights of an earlier policy and which rollouts [R] bool it sampled: their ratio is to that one.
        Returns metrics; with no advantage at all, no step is taken.
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
            now = [self.policy.log_prob(*looks.rows(part)) for part in parts]
            old, late = self._behaviour_log_prob(looks, parts, now, behaviour)
            reference = self._reference_log_prob(looks, parts)
            batch = _Scored(looks, weights, parts, old, now, late, reference, *self._anywhere(looks))
        before = [p.detach().clone() for p in self.parameters]
        if self.cfg.optimizer == "lbfgs":
            metrics |= self._lbfgs(batch)
            metrics |= self._shorten(looks, parts[0], now[0], before)
        else:
            for epoch in range(self.cfg.epochs):
                metrics |= self._epoch(batch, first=epoch == 0)
                metrics |= self._shorten(looks, parts[epoch % len(parts)], now[epoch % len(parts)], before)
                before = [p.detach().clone() for p in self.parameters]
        self.updates += 1
        return metrics

    def _anywhere(self, looks: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Looks of the batch at random, with advantage or without, in parts; and the policy's present centres there."""
        if self.cfg.kl_old == 0:
            return [], []
        every = torch.from_numpy(np.random.default_rng([29, self.updates]).permutation(len(looks.mask)))
        some = looks.split(every[: self.cfg.kl_old_looks].sort().values, self.cfg.minibatch_looks)
        return some, [self.policy.centre(*looks.rows(part)) for part in some]

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

    def _epoch(self, batch: _Scored, first: bool) -> dict:
        """One step of AdamW."""
        metrics = self._backward(batch, first)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.cfg.grad_clip)
        self.optimizer.step()
        return metrics | {"grad_norm": float(norm)}

    def _lbfgs(self, batch: _Scored) -> dict:
        """Up to `epochs` iterations of L-BFGS on the whole batch, begun afresh: what the batch says is fitted, not followed
        for one step. At the same distance it gains more on other starts than one step along the gradient, and a step that
        is normalised weight by weight spends most of its length on the gradient's noise (docs/open-questions.md)."""
        optimizer = torch.optim.LBFGS(
            self.parameters, lr=1.0, max_iter=self.cfg.epochs, history_size=12, line_search_fn="strong_wolfe",
            tolerance_grad=1e-10, tolerance_change=1e-14,
        )  # fmt: skip
        evaluated: list[dict] = []

        def closure() -> Tensor:
            evaluated.append(self._backward(batch, first=not evaluated))
            return torch.tensor(evaluated[-1]["loss"])

        optimizer.step(closure)
        with torch.no_grad():
            last = self._backward(batch, first=False)
        return last | {"evaluations": float(len(evaluated)), "loss_before": evaluated[0]["loss"]}

    def _backward(self, batch: _Scored, first: bool) -> dict:
        """Gradient of the whole batch's loss, accumulated over its parts; metrics. Under no_grad: the metrics alone."""
        for parameter in self.parameters:
            parameter.grad = None
        cfg, looks, collected = self.cfg, batch.looks, []
        for i, part in enumerate(batch.parts):
            logp = self.policy.log_prob(*looks.rows(part))
            if first:
                fresh = None if batch.late is None else ~batch.late[i]
                grpo.check_first_ratio(grpo.log_ratio(logp, batch.old[i]), fresh, grpo.ratio_tolerance(self.policy.dtype))
            loss, part_metrics = grpo.grpo_loss(
                logp, batch.old[i], looks.advantage[part], batch.weights[part], eps_low=cfg.eps_low, eps_high=cfg.eps_high,
                dual_clip=cfg.dual_clip, logp_ref=None if batch.reference is None else batch.reference[i], kl_coef=cfg.kl_beta,
            )  # fmt: skip
            if loss.requires_grad:
                loss.backward()
            collected.append(part_metrics)
        metrics = grpo.merge_metrics(collected) | {"kl_old": 0.0}
        rows = sum(len(part) for part in batch.anywhere)
        for part, centre in zip(batch.anywhere, batch.centres, strict=True):
            moved = self.policy.centre(*looks.rows(part)) - centre
            kl = 0.5 * moved.square().mean(1).sum() / rows
            if kl.requires_grad:
                (cfg.kl_old * kl).backward()
            metrics["kl_old"] += kl.item()
        metrics["loss"] += cfg.kl_old * metrics["kl_old"]
        return metrics

    def _reference_log_prob(self, looks: Batch, parts: list[Tensor]) -> list[Tensor] | None:
        """Log-probabilities under the first policy: without the adapter, or with its weights lent to the network."""
        if self.cfg.kl_beta == 0:
            return None
        if self.reference is None:
            with self.policy.without_adapter():
                return [self.policy.log_prob(*looks.rows(part)) for part in parts]
        with self.lent(self.reference):
            return [self.policy.log_prob(*looks.rows(part)) for part in parts]

    def _behaviour_log_prob(self, looks: Batch, parts: list[Tensor], now: list[Tensor], behaviour) -> tuple:
        """Log-probabilities under whichever policy sampled a row, and which rows are an earlier one's (None: nowhere)."""
        if behaviour is None:
            return now, None
        weights, sampled = behaviour
        late = [torch.from_numpy(np.asarray(sampled, bool))[looks.rollout[part]] for part in parts]
        with self.lent(weights):
            then = [self.policy.log_prob(*looks.rows(part)) for part in parts]
        return [torch.where(rows, t, n) for rows, t, n in zip(late, then, now, strict=True)], late

    def weights(self) -> list[Tensor]:
        """A copy of what trains."""
        return [p.detach().clone() for p in self.parameters]

    @contextmanager
    def lent(self, values: Sequence[Tensor]) -> Iterator[None]:
        """The policy with other weights, for the block."""
        own = self.weights()
        self._lend(values)
        try:
            yield
        finally:
            self._lend(own)

    def _lend(self, values: Sequence[Tensor]) -> None:
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
