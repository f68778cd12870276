"""Rotations for state-space world models, batched in torch. A rotation is its first two columns: 6 numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def matrix(rot6: Tensor) -> Tensor:
    """[..., 3, 3] rotation matrix of [..., 6] (two columns), made orthonormal (arXiv 1812.07035 Eq. 15)."""
    a, b = rot6[..., :3], rot6[..., 3:]
    x = torch.nn.functional.normalize(a, dim=-1)
    y = torch.nn.functional.normalize(b - (x * b).sum(-1, keepdim=True) * x, dim=-1)
    return torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1)


def frame(rot6: Tensor) -> Tensor:
    """`matrix` for a rot6 that is orthonormal already."""
    x, y = rot6.split(3, dim=-1)
    return torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1)


def rot6(mat: Tensor) -> Tensor:
    """[..., 6] of a rotation matrix [..., 3, 3]."""
    return torch.cat([mat[..., :, 0], mat[..., :, 1]], dim=-1)


def turn(rot6: Tensor, omega: Tensor) -> Tensor:
    """[..., 6]: `rot6` turned by a small rotation vector `omega` [..., 3] (world frame, rad), orthonormal again.

    First order in omega and then orthonormalised: off by up to omega^2 / 2, half a degree for a large step (0.13 rad).
    """
    both = rot6.unflatten(-1, (2, 3))
    x, y = (both + torch.linalg.cross(omega[..., None, :].expand_as(both), both)).unbind(-2)
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True))
    y = y - (x * y).sum(-1, keepdim=True) * x
    return torch.cat([x, y * torch.rsqrt((y * y).sum(-1, keepdim=True))], dim=-1)


def quaternion(mat: Tensor) -> Tensor:
    """[..., 4] (xyzw) of rotation matrices [..., 3, 3]; the largest component is positive, as MuJoCo has it for a hand
    that points down (x near 1), so that an axis-angle near pi does not jump."""
    m = mat
    four = torch.stack(
        [
            1 + m[..., 0, 0] - m[..., 1, 1] - m[..., 2, 2],
            1 - m[..., 0, 0] + m[..., 1, 1] - m[..., 2, 2],
            1 - m[..., 0, 0] - m[..., 1, 1] + m[..., 2, 2],
            1 + m[..., 0, 0] + m[..., 1, 1] + m[..., 2, 2],
        ],
        dim=-1,
    ).clamp(min=0)  # 4 x^2, 4 y^2, 4 z^2, 4 w^2
    yx, zx, zy = m[..., 1, 0], m[..., 2, 0], m[..., 2, 1]
    xy, xz, yz = m[..., 0, 1], m[..., 0, 2], m[..., 1, 2]
    rows = torch.stack(
        [
            torch.stack([four[..., 0], yx + xy, zx + xz, zy - yz], -1),
            torch.stack([yx + xy, four[..., 1], zy + yz, xz - zx], -1),
            torch.stack([zx + xz, zy + yz, four[..., 2], yx - xy], -1),
            torch.stack([zy - yz, xz - zx, yx - xy, four[..., 3]], -1),
        ],
        dim=-2,
    )  # row i is 4 q_i q: the one with the largest q_i is the most accurate
    best = four.argmax(-1)[..., None, None].expand(*four.shape[:-1], 1, 4)
    return torch.nn.functional.normalize(rows.gather(-2, best)[..., 0, :], dim=-1)


def axis_angle(quat: Tensor) -> Tensor:
    """[..., 3] rotation vector of [..., 4] (xyzw) by robosuite's formula: no sign flip, angle in [0, 2 pi)."""
    w = quat[..., 3:].clamp(-1.0, 1.0)
    norm = torch.sqrt(1.0 - w * w)
    scale = torch.where(norm > 1e-4, 2.0 * torch.arccos(w) / norm.clamp(min=1e-4), torch.full_like(w, 0.0))
    return quat[..., :3] * scale
