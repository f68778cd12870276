"""What GRPO needs of a policy: rollouts as rows, their log-probabilities with gradient, what trains.

A *row* is what has a ratio of its own: one look of a policy that acts in chunks, one sampled token of a language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

NO_SDE_STEP = -2  # the chunk was sampled deterministically: its log-prob is defined as 0
ALL_SDE_STEPS = -1


@dataclass(frozen=True)
class ChunkSample:
    """One sampled chunk per row. H control steps, A (padded) action dims, N denoising steps."""

    actions: Tensor  # [B, H, 7] float32, environment units, clipped to [-1, 1]
    chain: Tensor  # [B, N + 1, H, A] float32, normalised units; chain[:, 0] is the initial noise
    sde_step: Tensor  # [B] int64, the stochastic step (ALL_SDE_STEPS: every one, NO_SDE_STEP: none)


class Batch(Protocol):
    """A batch of rollouts as B rows."""

    rollout: Tensor  # [B] int64, which rollout a row belongs to
    advantage: Tensor  # [B] float64, the rollout's
    mask: Tensor  # [B] bool, rows that carry gradient

    def rows(self, index: Tensor) -> tuple:
        """What `log_prob` takes, for the rows [b] that `index` names."""
        ...

    def split(self, index: Tensor, size: int) -> list[Tensor]:
        """Rows `index` in parts of about `size`, each for one forward pass."""
        ...


class Trainable(Protocol):
    """A policy whose log-probabilities GRPO can differentiate. All that `Learner` asks of it."""

    dtype: torch.dtype  # of the network's arithmetic: how well a ratio reproduces

    def collate(self, rollouts: Sequence[Any], advantages: np.ndarray, valid: np.ndarray) -> Batch:
        """R rollouts of the policy's own kind, with advantages [R] and valid [R], as rows. A policy that acts in turns may
        also take R arrays of advantages, one value a turn."""
        ...

    def log_prob(self, *rows: Any) -> Tensor:
        """Log-probabilities [b] of rows, on the CPU or where the batch's weights are."""
        ...

    def parameters_to_train(self) -> list[tuple[str, nn.Parameter]]: ...

    def without_adapter(self) -> AbstractContextManager | None:
        """A context in which the policy is the one that training began with; None where there is no such switch."""
        ...


class Policy(Trainable, Protocol):
    """A policy that acts in chunks. `inputs` hold frozen vision features, not images."""

    def encode(self, images: dict[str, Tensor], state: Tensor, task: list[str]) -> dict[str, Tensor]: ...

    def sample(self, inputs: dict[str, Tensor], keys: Sequence[Sequence[int]], stochastic: bool) -> ChunkSample: ...

    def log_prob(self, inputs: dict[str, Tensor], chain: Tensor, sde_step: Tensor, executed: Tensor) -> Tensor: ...

    def save(self, path: str | Path) -> None: ...
