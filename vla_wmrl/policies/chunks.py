"""Rollouts of policies that act in chunks, as the rows that `Learner` trains on: one row is one look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_wmrl.policies.base import NO_SDE_STEP
from vla_wmrl.types import Rollout


@dataclass(frozen=True)
class Looks:
    """All looks of a batch of rollouts, flattened. B looks, H control steps a chunk. A `policies.base.Batch`."""

    inputs: dict[str, Tensor]  # each [B, ...]
    chain: Tensor  # [B, N + 1, H, A]
    sde_step: Tensor  # [B]
    executed: Tensor  # [B, H] bool
    rollout: Tensor  # [B] index into the rollouts
    advantage: Tensor  # [B] float64, the rollout's
    mask: Tensor  # [B] bool, looks that carry gradient

    def rows(self, index: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        """What `Policy.log_prob` takes, for some looks."""
        picked = {k: v[index] for k, v in self.inputs.items()}
        return picked, self.chain[index], self.sde_step[index], self.executed[index]

    def split(self, index: Tensor, size: int) -> list[Tensor]:
        """Parts of `index` of at most `size` looks."""
        return list(torch.split(index, size))


def flatten(rollouts: Sequence[Rollout], advantages: np.ndarray, valid: np.ndarray) -> Looks:
    """Looks of `rollouts` with `advantages` [R]; a rollout that is not `valid` [R], or has advantage 0, is masked.

    Advantage 0 adds nothing to the gradient; leaving its looks out of the forward pass changes no other weight, since
    `Learner.update` divides by the number of valid rollouts.
    """
    count = [r.looks for r in rollouts]
    owner = np.repeat(np.arange(len(rollouts)), count)
    live = valid & (advantages != 0.0)
    return Looks(
        inputs={k: torch.from_numpy(np.concatenate([r.inputs[k] for r in rollouts])) for k in rollouts[0].inputs},
        chain=torch.from_numpy(np.concatenate([r.chain for r in rollouts])),
        sde_step=torch.from_numpy(np.concatenate([r.sde_step for r in rollouts])),
        executed=torch.from_numpy(np.concatenate([r.executed for r in rollouts])),
        rollout=torch.from_numpy(owner),
        advantage=torch.from_numpy(advantages[owner]),
        mask=torch.from_numpy(
            live[owner] & np.concatenate([r.executed.any(1) & (r.sde_step != NO_SDE_STEP) for r in rollouts])
        ),
    )


class ChunkPolicy:
    """What a policy that acts in chunks tells the learner, unless it knows better."""

    dtype = torch.float32

    def collate(self, rollouts: Sequence[Rollout], advantages: np.ndarray, valid: np.ndarray) -> Looks:
        return flatten(rollouts, advantages, valid)

    def without_adapter(self) -> None:
        return None
