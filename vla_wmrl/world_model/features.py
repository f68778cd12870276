"""What the dynamics and the heads see of a scene: positions relative to the hand and to the goal, at several scales.

Written for few operations: a control step runs hundreds of times in a row, and on a CPU each operation costs more than
its arithmetic (a slice costs a whole zeroed tensor on the way back; a split does not).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vla_wmrl.world_model.geometry import frame
from vla_wmrl.world_model.scene import Context

ROBOT_PARTS, BODY_PARTS = (3, 6, 2, 3, 2), (3, 3, 3, 3, 3)
ROBOT_FEATURES, BODY_FEATURES, ACTION_FEATURES = 26, 37, 20
CENTRE, OPEN_WIDTH, WIDE = (-0.03, 0.05, 0.55), 0.04, 0.07  # m: the table's middle, half-open and nearly open fingers
LEVELS = torch.arange(0.01, 0.105, 0.01)  # m, from a flat box to a carton that stands
SIDES = torch.tensor([0.007, 0.015, 0.03, 0.045, 0.07, 0.1])  # m, from a finger's width to a basket's rim
SOFT, TOUCH_FEATURES = 0.004, len(LEVELS) + 2 * len(SIDES)
OBSTACLE_FEATURES = 7 + TOUCH_FEATURES
# The hand's body is 20 cm wide along the axis on which the fingers open, and hangs 4.5 cm above the grip site: it stands on the
# rim of a basket beside which the fingers reach for a can.
PALM = (0.1, 0.05)  # m from the grip site: an end of the hand's body, and half-way there
OUTLINE = torch.tensor([0.01, 0.025, 0.04, 0.055, 0.07, 0.085, 0.1])  # m from a thing's centre along the world's axes
ROUND = torch.tensor([0.01, 0.02, 0.03, 0.04, 0.05])  # m, from a can's axis
TALL = torch.arange(0.1, 0.205, 0.01)  # m above a thing's centre
REACH_FEATURES = 2 * (len(PALM) + 1) * len(OUTLINE) + len(ROUND) + len(TALL)
TILT = 0.04  # rad: a hand that points down is never far from it, and policies act on a degree
FINGERS = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])  # finger joints -> width, asymmetry
ROBOT_SCALE = torch.tensor([1 / 0.15] * 3 + [1.0] * 6 + [50.0, 100.0] + [10.0] * 2 + [4.0] * 6)
ROBOT_SHIFT = torch.tensor([-c / 0.15 for c in CENTRE] + [0.0] * 6 + [-50.0 * OPEN_WIDTH] + [0.0] * 9)
# saturating: body from hand (a finger's width, a grasp's margin), from goal, to its neighbour, height, speeds
FINE = torch.tensor([1 / 0.025] * 3 + [1 / 0.008] * 3 + [1 / 0.05] * 3 + [1 / 0.06] * 3 + [1 / 0.01, 1 / 0.05, 1 / 0.05])
COARSE = torch.tensor([10.0] * 3 + [5.0] * 3 + [10.0] + [0.3] * 3)


class Parts:
    """A scene, cut up once."""

    def __init__(self, robot: Tensor, bodies: Tensor):
        self.pos, self.rot, self.fingers, self.velocity, self.finger_velocity = robot.split(ROBOT_PARTS, dim=-1)
        self.frame = frame(self.rot)  # [B, 3, 3] the hand's axes
        self.body_pos, self.x, self.y, self.body_velocity, self.spin = bodies.split(BODY_PARTS, dim=-1)
        self.away = self.body_pos - self.pos[:, None]


def robot_features(p: Parts) -> Tensor:
    """[B, ROBOT_FEATURES]."""
    width = p.fingers @ FINGERS
    turned = (p.velocity[:, None] @ p.frame)[:, 0]
    plain = torch.cat([p.pos, p.rot, width, p.finger_velocity, turned, p.velocity], dim=-1) * ROBOT_SCALE + ROBOT_SHIFT
    return torch.cat([plain, torch.tanh((width[:, :1] - WIDE) / 0.004), torch.tanh(p.rot / TILT)], dim=-1)


def body_features(p: Parts, context: Context) -> Tensor:
    """[B, M, BODY_FEATURES]."""
    here = p.body_pos.detach()
    everything = torch.cat([here, context.others], dim=1)
    target = everything.gather(1, context.target[..., None].expand(-1, -1, 3))
    gaps = everything[:, None] - here[:, :, None]  # [B, M, M + D, 3]
    near = (gaps.square().sum(-1) + context.blocked).argmin(-1)
    neighbour = everything.gather(1, near[..., None].expand(-1, -1, 3))
    # one product turns every vector into the hand's frame
    vectors = torch.stack([p.away, p.x, p.y, p.body_velocity, p.spin], dim=2) @ p.frame[:, None]
    by_hand, x, y, velocity, spin = vectors.unbind(2)
    goal = p.body_pos - target
    height = p.body_pos[..., 2:] - context.rest[..., None]
    x0, x1, x2 = p.x.split(1, dim=-1)
    y0, y1, y2 = p.y.split(1, dim=-1)
    fine = [by_hand, by_hand, goal, neighbour - p.body_pos, height, p.body_velocity[..., 2:], p.away[..., 2:]]
    coarse = [by_hand, goal, height, spin]
    up = [x2, y2, x0 * y1 - x1 * y0]  # the world's, in the body's frame
    return torch.cat(
        [
            torch.tanh(torch.cat(fine, dim=-1) * FINE),
            (torch.cat(coarse, dim=-1) * COARSE).clamp(-3, 3),
            x,
            y,
            *up,
            velocity * 4,
        ],
        dim=-1,
    )


def touch_features(away: Tensor, axes: Tensor) -> Tensor:
    """[B, N, TOUCH_FEATURES]: what decides whether fingers land on a thing, as soft thresholds: how high the hand is above its
    centre, and how far beside it along either axis of the hand. away [B, N, 3]: from the hand to the thing."""
    above = torch.tanh((-away[..., 2:] - LEVELS) / SOFT)
    beside = (away @ axes)[..., :2].abs()
    return torch.cat(
        [above, torch.tanh((beside[..., :1] - SIDES) / SOFT), torch.tanh((beside[..., 1:] - SIDES) / SOFT)], dim=-1
    )


def reach_features(p: Parts, away: Tensor) -> Tensor:
    """[B, N, 2, REACH_FEATURES], for either side of the hand: whether a finger, or the hand's body above it, is over a thing.

    away [B, N, 3]: from the hand to the thing. Along the world's axes, on which boxes and baskets mostly lie.
    """
    axis = p.frame[..., 0]  # [B, 3] the fingers open along it, the first one backwards
    side = axis.new_tensor([-1.0, 1.0])
    out = torch.stack([p.fingers.abs(), *(torch.full_like(p.fingers, reach) for reach in PALM)], dim=-1) * side[:, None]
    gap = away[:, :, None, None, :2] - (out[..., None] * axis[:, None, None])[:, None, :, :, :2]  # [B, N, 2, 3, 2]
    outline = torch.tanh((gap.abs()[..., None] - OUTLINE) / SOFT).flatten(-3)
    radius = gap[..., 0, :].square().sum(-1, keepdim=True).clamp(min=1e-8).sqrt()
    above = torch.tanh((-away[..., 2:] - TALL) / SOFT)[:, :, None].expand(-1, -1, 2, -1)
    return torch.cat([outline, torch.tanh((radius - ROUND) / SOFT), above], dim=-1)


def obstacle_features(p: Parts, context: Context) -> Tensor:
    """[B, D, OBSTACLE_FEATURES] of what is wanted nowhere and stops a hand all the same."""
    away = context.others - p.pos[:, None]
    turned = away @ p.frame
    return torch.cat(
        [
            torch.tanh(turned / 0.025),
            (turned * 10).clamp(-3, 3),
            torch.tanh(away[..., 2:] / 0.05),
            touch_features(away, p.frame),
        ],
        dim=-1,
    )


def action_features(action: Tensor, previous: Tensor, axes: Tensor) -> Tensor:
    """[B, ACTION_FEATURES] of two actions [B, 7] and the hand's axes [B, 3, 3]."""
    turned = action[:, :6].unflatten(-1, (2, 3)) @ axes
    return torch.cat([action, previous, turned.flatten(1)], dim=-1)
