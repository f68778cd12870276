"""A supervised step: a language model imitates tokens that others wrote, by the optimiser of a `Learner`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from text_agents.transcripts import TokenRollout
from vla_wmrl import grpo
from vla_wmrl.learner import Learner


def imitate(learner: Learner, labels: Sequence[TokenRollout]) -> dict[str, float]:
    """A step on the mean negative log-likelihood of the policy tokens of N transcripts, each weighing the same."""
    policy, cfg = learner.policy, learner.cfg
    rows = policy.collate(labels, np.ones(len(labels)), np.ones(len(labels), bool))
    weights = grpo.look_weights(rows.rollout, rows.mask, len(labels))
    learner.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for part in rows.split(torch.arange(len(rows.mask)), cfg.minibatch_looks):
        loss = -(weights[part] * policy.log_prob(*rows.rows(part))).sum()
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(learner.parameters, cfg.grad_clip)
    learner.optimizer.step()
    learner.updates += 1
    return {"nll": total, "grad_norm": float(norm), "looks": float(len(rows.mask))}
