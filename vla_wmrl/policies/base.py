"""What GRPO needs of a policy that acts in chunks: sample with a stored chain, score it again, name what trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

NO_SDE_STEP = -2  # the chunk was sampled deterministically: its log-prob is defined as 0
ALL_SDE_STEPS = -1


@dataclass(frozen=True)
class ChunkSample:
    """One sampled chunk per row. H control steps, A (padded) action dims, N denoising steps."""

    actions: Tensor  # [B, H, 7] float32, environment units, clipped to [-1, 1]
    chain: Tensor  # [B, N + 1, H, A] float32, normalised units; chain[:, 0] is the initial noise
    sde_step: Tensor  # [B] int64, the stochastic step (ALL_SDE_STEPS: every one, NO_SDE_STEP: none)


class Policy(Protocol):
    """A policy whose log-probabilities GRPO can differentiate. `inputs` hold frozen vision features, not images."""

    def encode(self, images: dict[str, Tensor], state: Tensor, task: list[str]) -> dict[str, Tensor]: ...

    def sample(self, inputs: dict[str, Tensor], keys: Sequence[Sequence[int]], stochastic: bool) -> ChunkSample: ...

    def log_prob(self, inputs: dict[str, Tensor], chain: Tensor, sde_step: Tensor, executed: Tensor) -> Tensor: ...

    def parameters_to_train(self) -> list[tuple[str, nn.Parameter]]: ...

    def save(self, path: str | Path) -> None: ...
