"""What the dynamics and the heads see of a scene: positions relative to the hand and to the goal, at several scales."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_wmrl.world_model.scene import Context

OPEN_WIDTH = 0.04  # m, the middle of the fingers' range
ROBOT_FEATURES, BODY_FEATURES, ACTION_FEATURES = 20, 37, 20


def robot_features(robot: Tensor, frame: Tensor) -> Tensor:
    """[B, ROBOT_FEATURES] of robot [B, 16]; `frame` [B, 3, 3] is the hand's."""
    left, right = robot[:, 9:10], robot[:, 10:11]
    width = left - right
    return torch.cat(
        [
            (robot[:, :3] - robot.new_tensor([-0.03, 0.05, 0.55])) / 0.15,
            robot[:, 3:9],
            (width - OPEN_WIDTH) / 0.02,
            torch.tanh((width - 0.07) / 0.004),
            (left + right) * 100,
            robot[:, 14:16] * 10,
            (robot[:, None, 11:14] @ frame)[:, 0] * 4,
            robot[:, 11:14] * 4,
        ],
        dim=-1,
    )


def body_features(robot: Tensor, bodies: Tensor, context: Context, frame: Tensor) -> Tensor:
    """[B, M, BODY_FEATURES]: at the scales of the table (0.1 m), a finger (0.025 m) and a grasp's margin (0.008 m)."""
    pos = bodies[..., :3]
    away = pos - robot[:, None, :3]
    everything = torch.cat([pos, context.others], dim=1)
    target = everything.gather(1, context.target[..., None].expand(-1, -1, 3))
    gaps = everything[:, None] - pos[:, :, None]  # [B, M, M + D, 3]
    near = (gaps.detach().square().sum(-1) + context.blocked).argmin(-1)
    gap = gaps.gather(2, near[..., None, None].expand(-1, -1, 1, 3))[:, :, 0]
    height = pos[..., 2:] - context.rest[..., None]
    goal = pos - target
    x, y = bodies[..., 3:6], bodies[..., 6:9]
    # one product turns every vector into the hand's frame
    turned = torch.cat([away, x, y, bodies[..., 9:15]], dim=-1).unflatten(-1, (5, 3)) @ frame[:, None]
    near_hand = turned[..., 0, :]
    up = torch.stack(
        [x[..., 2], y[..., 2], x[..., 0] * y[..., 1] - x[..., 1] * y[..., 0]], dim=-1
    )  # in the body's frame
    return torch.cat(
        [
            (near_hand / 0.1).clamp(-3, 3),
            torch.tanh(
                torch.cat([near_hand / 0.025, near_hand / 0.008, goal / 0.05, gap / 0.06, height / 0.01], dim=-1)
            ),
            (goal / 0.2).clamp(-3, 3),
            (height / 0.1).clamp(-3, 3),
            turned[..., 1:3, :].flatten(-2),
            up,
            turned[..., 3, :] * 4,
            turned[..., 4, :].clamp(-10, 10) * 0.3,
            torch.tanh(bodies[..., 11:12] / 0.05),
            torch.tanh(away[..., 2:] / 0.05),
        ],
        dim=-1,
    )


def action_features(action: Tensor, previous: Tensor, frame: Tensor) -> Tensor:
    """[B, ACTION_FEATURES] of two actions [B, 7]."""
    turned = action[:, :6].unflatten(-1, (2, 3)) @ frame
    return torch.cat([action, previous, turned.flatten(1)], dim=-1)
