"""Where a flow policy's exploration noise lives: a few smooth components over the executed part of a chunk.

White noise of every control step and dimension averages out over a chunk: it moves the hand little, and its dozens of
directions all enter the policy gradient's noise. Noise that is constant (first component) or slowly varying over the
executed steps moves the hand where white noise of the same size jitters, and a look then has a handful of explored
numbers instead of H x A (on temporally correlated exploration: Eberhard et al., Pink Noise Is All You Need, ICLR 2023).

The members of a group may share those few numbers out among themselves (`designed_noise`): opposite pairs along directions
at right angles try every direction once each way, where independent draws try some twice and mix up what they tell of one
with what they tell of another (Choromanski et al., Structured Evolution with Compact Architectures, ICML 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vla_wmrl.errors import UserError
from vla_wmrl.policies.noise import SDE, generator


def smooth_basis(components: int, executed: int, horizon: int) -> Tensor:
    """[K, H] float32: the first K cosines (DCT-II) over the `executed` first steps, 0 after; the mean square of each is 1."""
    if not 1 <= components <= executed:
        raise UserError(f"policy.noise_components={components}: it must be between 1 and the {executed} executed steps")
    step = torch.arange(executed, dtype=torch.float64) + 0.5
    rows = [torch.cos(math.pi * k * step / executed) * (1.0 if k == 0 else math.sqrt(2.0)) for k in range(components)]
    basis = torch.zeros(components, horizon, dtype=torch.float64)
    basis[:, :executed] = torch.stack(rows)
    return basis.to(torch.float32)


def designed_noise(key: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal float32 array of `shape` for `key`, whose last part is the member of a group.

    Members 2j and 2j + 1 are each other's negative; pairs 0 to d - 1, d the number of elements, are at right angles, with
    lengths of their own (chi of d degrees of freedom); the next 2d members begin another such set. Each member on its own
    is exactly normal, so that log-probabilities are those of independent draws.
    """
    d, member = int(np.prod(shape)), int(key[-1])
    block, place = divmod(member, 2 * d)
    rng = generator((*key[:-1], block), SDE)
    q, r = np.linalg.qr(rng.standard_normal((d, d)))
    direction = (q * np.sign(np.diag(r)))[:, place // 2]  # uniform on the sphere
    length = np.sqrt(rng.chisquare(d, size=d))[place // 2]
    return (direction * length * (1 - 2 * (place % 2))).astype(np.float32).reshape(shape)


class SmoothNoise:
    """Noise w [..., K, D] on the D action dims whose `scale` is not 0, spread over a chunk by the basis; and back."""

    def __init__(self, components: int, executed: int, horizon: int, scale: Sequence[float], padded_dim: int):
        self.basis, self.executed = smooth_basis(components, executed, horizon), executed
        self.dims = [i for i, s in enumerate(scale) if s != 0]
        self.scale = torch.tensor([s for s in scale if s != 0], dtype=torch.float32)
        self.shape, self.padded_dim = (components, len(self.dims)), padded_dim

    def spread(self, w: Tensor) -> Tensor:
        """[..., H, A] from w [..., K, D]."""
        out = w.new_zeros(*w.shape[:-2], self.basis.shape[1], self.padded_dim)
        out[..., self.dims] = torch.einsum("kh,...kd->...hd", self.basis, w * self.scale)
        return out

    def coordinates(self, x: Tensor) -> Tensor:
        """w [..., K, D] of x [..., H, A]: the inverse of `spread` on what it reaches, a projection of the rest."""
        return torch.einsum("kh,...hd->...kd", self.basis, x[..., self.dims]) / (self.executed * self.scale)
