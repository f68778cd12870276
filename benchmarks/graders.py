"""Graders that a world model is compared with: they see a segment's start and its actions, and say whether it lifts.

* "actions": a recurrent network on actions and the robot's own state, no object. What it reaches is not foresight.
* "geometry": where the hand will be when the gripper closes, by linear dead reckoning, relative to the nearest object
  of the goal; a small network on those few numbers. Fitted on the same segments as the world model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vla_wmrl.world_model.base import TaskSpec

LIFT_M = 0.03  # an object that ends this much higher was lifted


@dataclass(frozen=True)
class Replays:
    """n segments of one length T, of any task."""

    states: list[np.ndarray]  # n times [T + 1, S]
    actions: np.ndarray  # [n, T, 7]
    previous: np.ndarray  # [n, 7]
    task: np.ndarray  # [n]
    init: np.ndarray  # [n]
    group: np.ndarray  # [n] int, the snapshot
    lifted: np.ndarray  # [n] bool
    robot: np.ndarray  # [n, 16] at the start
    bodies: np.ndarray  # [n, M, 3] positions of the goal's objects at the start, NaN where fewer


def gather(segments: Sequence, tasks: dict[int, TaskSpec]) -> Replays:
    """Segments as arrays, with their outcome."""
    most = max(len(t.targets()) for t in tasks.values())
    keys: dict[tuple, int] = {}
    bodies, robot, lifted = [], [], []
    for s in segments:
        task, states = tasks[s.trace.task_id], s.trace.states
        first = task.layout["robot/eef_pos"][0]
        starts = [task.layout[f"{name}/pos"][0] for name in task.targets()]
        lifted.append(max(states[-1, i + 2] - states[0, i + 2] for i in starts) > LIFT_M)
        bodies.append([states[0, i : i + 3] for i in starts] + [np.full(3, np.nan)] * (most - len(starts)))
        robot.append(states[0, first : first + 16])
        keys.setdefault(s.group, len(keys))
    return Replays(
        states=[s.trace.states for s in segments],
        actions=np.stack([s.trace.actions for s in segments]),
        previous=np.stack([s.trace.previous for s in segments]),
        task=np.array([s.trace.task_id for s in segments]),
        init=np.array([s.trace.init_id for s in segments]),
        group=np.array([keys[s.group] for s in segments]),
        lifted=np.array(lifted),
        robot=np.stack(robot),
        bodies=np.array(bodies),
    )


# ---- actions only
class _Recurrent(nn.Module):
    def __init__(self, inputs: int, state: int, width: int = 64):
        super().__init__()
        self.begin = nn.Linear(state, width)
        self.gru = nn.GRU(inputs, width, batch_first=True)
        self.out = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Dropout(0.2), nn.Linear(width, 1))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        y, _ = self.gru(x, torch.tanh(self.begin(state))[None])
        return self.out(torch.cat([y.amax(1), y[:, -1]], dim=-1))[:, 0]


def actions_only(train: Replays, test: Replays, seed: int, epochs: int = 25) -> np.ndarray:
    """[n] P(lifted) of `test` from actions and proprioception."""

    def inputs(r: Replays) -> tuple[Tensor, Tensor]:
        x = np.concatenate([r.actions[..., [0, 1, 2, 6]], np.cumsum(r.actions[..., :3], 1) / 8], axis=-1)
        return torch.from_numpy(x).float(), torch.from_numpy(np.concatenate([r.robot, r.previous], 1)).float()

    return _fit(lambda x, s: _Recurrent(x.shape[-1], s.shape[-1]), inputs, train, test, seed, epochs)


# ---- geometry
def dead_reckoning(train: Replays, tasks: dict[int, TaskSpec]):
    """A linear model of the hand's step from two actions and its last step: f(replays) -> path [n, T + 1, 3]."""
    rows, aims = [], []
    for states, actions, previous, task in zip(train.states, train.actions, train.previous, train.task, strict=True):
        first = tasks[int(task)].layout["robot/eef_pos"][0]
        eef = states[:, first : first + 3]
        step = np.diff(eef, axis=0)
        before = np.concatenate([states[:1, first + 11 : first + 14] * 0.05, step[:-1]])
        last = np.concatenate([previous[None], actions[:-1]])
        rows.append(np.concatenate([actions[:, :3], last[:, :3], before, np.ones((len(step), 1))], axis=1))
        aims.append(step)
    weights, *_ = np.linalg.lstsq(np.concatenate(rows), np.concatenate(aims), rcond=None)

    def path(r: Replays) -> np.ndarray:
        eef, step, last = r.robot[:, :3], r.robot[:, 11:14] * 0.05, r.previous
        found = [eef]
        for t in range(r.actions.shape[1]):
            action = r.actions[:, t]
            row = np.concatenate([action[:, :3], last[:, :3], step, np.ones((len(step), 1))], axis=1)
            step, last = row @ weights, action
            found.append(found[-1] + step)
        return np.stack(found, axis=1)

    return path


def geometry(train: Replays, test: Replays, tasks: dict[int, TaskSpec], seed: int, epochs: int = 60) -> np.ndarray:
    """[n] P(lifted) of `test` from relative vectors at the closing, dead-reckoned."""
    path = dead_reckoning(train, tasks)

    def inputs(r: Replays) -> tuple[Tensor, Tensor]:
        eef, closed = path(r), r.actions[..., 6] > 0
        closing = np.where(closed.any(1), closed.argmax(1), closed.shape[1])
        at = eef[np.arange(len(eef)), closing]
        gaps = r.bodies - at[:, None]
        gaps = gaps[np.arange(len(eef)), np.nanargmin(np.square(gaps).sum(-1), axis=1)]
        held = np.array([c[t:].sum() for c, t in zip(closed, closing, strict=True)])
        later = eef[np.arange(len(eef)), np.minimum(closing + 12, eef.shape[1] - 1)] - at
        flat = np.linalg.norm(gaps[:, :2], axis=1, keepdims=True)
        kind = np.eye(10)[r.task % 10]
        x = np.concatenate(
            [gaps / 0.03, np.abs(gaps) / 0.03, np.tanh(gaps / 0.01), flat / 0.03,
             closing[:, None] / 32, held[:, None] / 32,
             (eef[:, -1, 2:] - at[:, 2:]) / 0.1, later / 0.05, kind], axis=1)  # fmt: skip
        return torch.from_numpy(x).float()[:, None], torch.zeros(len(x), 1)

    def network(x: Tensor, _: Tensor) -> nn.Module:
        return _Flat(x.shape[-1])

    return _fit(network, inputs, train, test, seed, epochs)


class _Flat(nn.Module):
    def __init__(self, inputs: int, width: int = 48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, width),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.net(x[:, 0])[:, 0]


def _fit(build, inputs, train: Replays, test: Replays, seed: int, epochs: int, members: int = 2) -> np.ndarray:
    """Mean prediction on `test` of `members` networks trained on `train`."""
    (x, s), (x_test, s_test) = inputs(train), inputs(test)
    mean, spread = s.mean(0), s.std(0) + 1e-3
    s, s_test = ((s - mean) / spread).clamp(-5, 5), ((s_test - mean) / spread).clamp(-5, 5)
    y, found = torch.from_numpy(train.lifted).float(), []
    for member in range(members):
        torch.manual_seed(1000 * seed + member)
        net = build(x, s)
        optimiser = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=1e-2)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(64):
                if len(rows) < 8:
                    continue
                loss = nn.functional.binary_cross_entropy_with_logits(net(x[rows], s[rows]), y[rows])
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimiser.step()
        net.eval()
        with torch.no_grad():
            found.append(torch.sigmoid(net(x_test, s_test)).numpy())
    return np.mean(found, axis=0)
