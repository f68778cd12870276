"""The dynamics of a hand and the objects of a goal, one control step (50 ms) at a time, and what to read off a state.

Object-centric: every body goes through the same network (with an embedding of its type), the hand sees the maximum over
bodies and over what else lies there, and can be stopped along its axes. A body follows the hand (gate `hold`) or moves by
itself (gate `free`, with its own velocity).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_wmrl.world_model import features
from vla_wmrl.world_model.base import CONTROL_S
from vla_wmrl.world_model.features import ACTION_FEATURES, BODY_FEATURES, ROBOT_FEATURES, Parts
from vla_wmrl.world_model.geometry import turn
from vla_wmrl.world_model.scene import Context

LIMIT = 0.042  # m, of a finger joint
BODY_OUTPUTS, ROBOT_OUTPUTS, TOUCH = 9, 12, 64
# body: hold, free, push 3, spin 3, noise; robot: position 3, rotation 3, fingers 2, noise, stops 3
EEF_STEP, EEF_TURN, FINGER_STEP, BODY_STEP, BODY_TURN = 0.005, 0.02, 0.003, 0.01, 0.05  # scales of the outputs
NOISE_SCALE = 0.002  # m a control step, at a raw output of 0


class Scene(NamedTuple):
    """One state of B rollouts: robot [B, 16], bodies [B, M, 15] (see world_model.scene)."""

    robot: Tensor
    bodies: Tensor


class Grades(NamedTuple):
    """Logits of what holds in a state."""

    held: Tensor  # [B, M] the body is in the hand and off its support
    there: Tensor  # [B, M] the body is where the goal wants it
    progress: Tensor  # [B] stage progress (after a sigmoid)
    value: Tensor  # [B] the episode succeeds in the end


class Dynamics(nn.Module):
    """The network. `types`, `other_types`, `tasks`: how many kinds of bodies, of other things and tasks it knows."""

    def __init__(self, types: int, other_types: int, tasks: int, width: int = 128, embedding: int = 8):
        super().__init__()
        state = ROBOT_FEATURES + BODY_FEATURES + embedding
        self.embed = nn.Embedding(types, embedding)
        self.first = nn.Linear(state + ACTION_FEATURES, width)
        self.second = nn.Linear(width, width)
        self.body_out = nn.Linear(width, BODY_OUTPUTS)
        # what stops the hand (fingers on a rim) is not what moves a body: layers of its own
        touching = state + ACTION_FEATURES + features.TOUCH_FEATURES + features.REACH_FEATURES
        self.touch = nn.Sequential(nn.Linear(touching, TOUCH), nn.SiLU(), nn.Linear(TOUCH, TOUCH), nn.SiLU())
        self.embed_other = nn.Embedding(other_types, embedding)
        beside = ROBOT_FEATURES + ACTION_FEATURES + features.OBSTACLE_FEATURES + embedding + features.REACH_FEATURES
        self.obstacle = nn.Sequential(nn.Linear(beside, TOUCH), nn.SiLU(), nn.Linear(TOUCH, TOUCH), nn.SiLU())
        self.robot_first = nn.Linear(ROBOT_FEATURES + ACTION_FEATURES + width + 2 * TOUCH, width)
        self.robot_out = nn.Linear(width, ROBOT_OUTPUTS)
        self.arm = nn.Linear(14, 6)  # the free arm is nearly linear in two actions
        self.momentum = nn.Parameter(torch.full((3,), 0.4))
        self.grade_body = nn.Sequential(nn.Linear(state, 96), nn.SiLU(), nn.Linear(96, 64), nn.SiLU())
        self.grade_held, self.grade_there = nn.Linear(64, 1), nn.Linear(64, 1)
        self.grade_task = nn.Embedding(tasks, embedding)
        self.grade_all = nn.Sequential(nn.Linear(128 + ROBOT_FEATURES + embedding, 64), nn.SiLU(), nn.Linear(64, 2))
        with torch.no_grad():
            for layer in (self.body_out, self.robot_out):
                layer.weight.mul_(0.1)
                layer.bias.zero_()
            self.body_out.bias[:2] = -3.0  # nothing moves by itself, nothing is held
            self.robot_out.bias[-3:] = -4.0  # nothing stops the hand
            self.arm.weight.zero_()
            self.arm.bias.zero_()
            self.arm.weight[torch.arange(3), torch.arange(3)] = 1.5  # x EEF_STEP, at a momentum of 0.4: 1.25 cm a unit
            self.arm.weight[torch.arange(3, 6), torch.arange(3, 6)] = 2.0

    def step(self, scene: Scene, context: Context, action: Tensor, previous: Tensor, noise: Tensor | None = None):
        """The state one control step on, and the log of its noise scale [B, 1 + M] (hand, bodies).

        action, previous [B, 7]; noise [B, 1 + M, 3] standard normal, or None for the mean.
        """
        return self._step(scene, context, self.tags(context), action, previous, self.drive(action, previous), noise)

    def tags(self, context: Context) -> tuple[Tensor, Tensor]:
        """What kinds of things there are: [B, M, embedding] of bodies, [B, D, embedding] of the rest."""
        return self.embed(context.kind), self.embed_other(context.other_kind)

    def drive(self, action: Tensor, previous: Tensor) -> Tensor:
        """[..., 6] what the free arm does for two actions [..., 7]: movement and rotation, in units of a step."""
        return self.arm(torch.cat([action, previous], dim=-1))

    def _step(self, scene: Scene, context: Context, tags: tuple[Tensor, Tensor], action, previous, drive: Tensor, noise):
        p = Parts(*scene)
        back = p.frame.transpose(-1, -2)  # from the hand's frame to the world's
        hand = torch.cat([features.robot_features(p), features.action_features(action, previous, p.frame)], dim=-1)
        seen = torch.cat([features.body_features(p, context), tags[0]], dim=-1)
        pairs = torch.cat([hand[:, None].expand(-1, seen.shape[1], -1), seen], dim=-1)
        x = F.silu(self.second(F.silu(self.first(pairs))))
        present = context.present[..., None]
        touch = self._sides(self.touch, p, p.away, pairs, features.touch_features(p.away, p.frame)) * present
        beside = torch.cat([features.obstacle_features(p, context), tags[1]], dim=-1)
        wide = hand[:, None].expand(-1, beside.shape[1], -1)
        lies = self._sides(self.obstacle, p, context.others - p.pos[:, None], wide, beside)
        lies = lies * (context.other_kind > 0)[..., None]
        pooled = torch.cat([(x * present).amax(dim=1), touch.amax(dim=1), lies.amax(dim=1)], dim=-1)
        own = self.robot_out(F.silu(self.robot_first(torch.cat([hand, pooled], dim=-1))))
        moving, grip, hand_scale, stops = own.split((6, 2, 1, 3), dim=-1)
        gates, motion, body_scale = self.body_out(x).split((2, 6, 1), dim=-1)
        scales = torch.cat([hand_scale, body_scale[..., 0]], dim=1)

        move, omega = (drive.unflatten(-1, (2, 3)) + moving.unflatten(-1, (2, 3)) @ back).unbind(1)
        move = move * EEF_STEP + self.momentum * p.velocity * CONTROL_S
        passes = 1 - torch.sigmoid(stops)  # along the hand's axes: fingers that landed on something do not go on
        move = ((move[:, None] @ p.frame) * passes[:, None] @ back)[:, 0]
        omega = omega * EEF_TURN
        push, spin = (motion.unflatten(-1, (2, 3)) @ back[:, None]).unbind(2)
        hold, free = torch.sigmoid(gates).split(1, dim=-1)
        slide = push * BODY_STEP + p.body_velocity.clamp(-3, 3) * CONTROL_S
        tumble = spin * BODY_TURN + p.spin.clamp(-8, 8) * CONTROL_S
        if noise is not None:
            shift = noise * (NOISE_SCALE * torch.exp(scales.clamp(-6, 3)))[..., None]
            move = move + shift[:, 0]
            slide = slide + shift[:, 1:]
        fingers = (p.fingers + grip * FINGER_STEP + p.finger_velocity * (0.5 * CONTROL_S)).clamp(-LIMIT, LIMIT)
        closing = (fingers - p.fingers) / CONTROL_S
        robot = torch.cat([p.pos + move, turn(p.rot, omega), fingers, move / CONTROL_S, closing], dim=-1)

        around = omega[:, None]
        swing = torch.linalg.cross(around.expand_as(p.away), p.away)
        delta = (hold * (move[:, None] + swing) + free * slide) * present
        rolled = (hold * around + free * tumble) * present
        turned = turn(torch.cat([p.x, p.y], dim=-1), rolled)
        bodies = torch.cat([p.body_pos + delta, turned, delta / CONTROL_S, rolled / CONTROL_S], dim=-1)
        return Scene(robot, bodies), scales

    def _sides(self, net: nn.Module, p: Parts, away: Tensor, *seen: Tensor) -> Tensor:
        """[B, N, TOUCH] the maximum of `net` over both sides of the hand; `seen` [B, N, ...] is the same for either."""
        same = torch.cat(seen, dim=-1)[:, :, None].expand(-1, -1, 2, -1)
        return net(torch.cat([same, features.reach_features(p, away)], dim=-1)).amax(dim=2)

    def grade(self, scene: Scene, context: Context) -> Grades:
        """What holds in `scene`."""
        p = Parts(*scene)
        hand = features.robot_features(p)
        seen = torch.cat([features.body_features(p, context), self.embed(context.kind)], dim=-1)
        x = self.grade_body(torch.cat([hand[:, None].expand(-1, seen.shape[1], -1), seen], dim=-1))
        there = x * context.present[..., None]
        pooled = torch.cat([there.sum(1), there.amax(1)], dim=-1)
        both = self.grade_all(torch.cat([pooled, hand, self.grade_task(context.task)], dim=-1))
        return Grades(self.grade_held(x)[..., 0], self.grade_there(x)[..., 0], both[:, 0], both[:, 1])

    def log_success(self, grades: Grades, context: Context) -> Tensor:
        """[B] log P(the goal holds): every wanted body is there."""
        return (F.logsigmoid(grades.there) * context.present).sum(-1)


def roll(net: Dynamics, scene: Scene, context: Context, actions: Tensor, previous: Tensor) -> tuple[Scene, Tensor]:
    """The mean path under `actions` [B, T, 7]: Scene with leaves [B, T, ...], noise scales [B, T, 1 + M]."""
    robots, bodies, scales = [], [], []
    before = torch.cat([previous[:, None], actions[:, :-1]], dim=1)
    drive, tags = net.drive(actions, before), net.tags(context)
    for t in range(actions.shape[1]):
        scene, scale = net._step(scene, context, tags, actions[:, t], before[:, t], drive[:, t], None)
        robots.append(scene.robot)
        bodies.append(scene.bodies)
        scales.append(scale)
    return Scene(torch.stack(robots, 1), torch.stack(bodies, 1)), torch.stack(scales, 1)
