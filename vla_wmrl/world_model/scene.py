"""From a task's state vector to what the dynamics step, and back. All tasks share one form, for one model.

* robot [B, 16]: eef position 3, rotation 6, finger joints 2, eef velocity 3, finger velocities 2 (world frame, m, m/s)
* bodies [B, M, 15]: the objects that the goal wants somewhere: position 3, rotation 6, velocity 3, angular velocity 3
  (world frame; the state vector's own angular velocity is in the body's frame). Rows of smaller tasks are padded.
* Everything else (distractors, containers, fixtures, joints, arm joints) stays as it was at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from vla_wmrl.world_model.base import TaskSpec
from vla_wmrl.world_model.geometry import axis_angle, matrix, quaternion, rot6

ROBOT, BODY = 16, 15
FAR = 10.0  # m, where padding lies
NOTHING = "nothing"  # the type of padding


def category(name: str) -> str:
    """`alphabet_soup_1` -> `alphabet_soup`."""
    return name.rsplit("_", 1)[0]


@dataclass(frozen=True)
class Context:
    """What does not move during a rollout, one row a rollout. M bodies, D other things."""

    kind: Tensor  # [B, M] int64, index into the model's list of types
    task: Tensor  # [B] int64, index into the model's list of tasks
    present: Tensor  # [B, M] float, 0 for padding
    target: Tensor  # [B, M] int64, index into bodies + others of where it must get to (itself: nowhere)
    rest: Tensor  # [B, M] height of the body's origin when it lies on its support, m
    others: Tensor  # [B, D, 3] positions of everything that does not move
    other_kind: Tensor  # [B, D] int64, index into the model's list of other types, 0 for padding
    blocked: Tensor  # [B, M, M + D] float, large for what may not count as a body's neighbour

    def rows(self, index: Tensor) -> Context:
        return Context(*(getattr(self, f.name)[index] for f in fields(self)))

    def replace(self, index: Tensor, other: Context) -> Context:
        """With rows `index` [N] taken from `other`, of N rows."""
        return Context(*(getattr(self, f.name).index_copy(0, index, getattr(other, f.name)) for f in fields(self)))


class Scenes:
    """Knows the tasks' layouts; turns state vectors of any of them into one padded form."""

    def __init__(self, tasks: Sequence[TaskSpec]):
        self.tasks = {task.task_id: task for task in tasks}
        self.order = sorted(self.tasks)
        self.names = {t.task_id: tuple(t.targets()) for t in tasks}
        self.types = [NOTHING, *sorted({category(n) for names in self.names.values() for n in names})]
        self.bodies = max(len(names) for names in self.names.values())
        still = {category(n) for t in tasks for n in self.still(t)}
        self.other_types = [NOTHING, *sorted(still)]
        self.others = max(1, max(len(t.objects) + len(t.fixtures) - len(self.names[t.task_id]) for t in tasks))

    def still(self, task: TaskSpec) -> list[str]:
        """What lies in the way but is wanted nowhere: distractors, containers, fixtures."""
        return [name for name in (*task.objects, *task.fixtures) if name not in self.names[task.task_id]]

    def _start(self, task: TaskSpec, name: str) -> int:
        return task.layout[f"{name}/pos"][0]

    def read(self, task_id: int, states: np.ndarray) -> tuple[Tensor, Tensor]:
        """robot [..., 16] and bodies [..., M, 15] of `states` [..., S]."""
        task, state = self.tasks[task_id], torch.as_tensor(states, dtype=torch.float32)
        first = task.layout["robot/eef_pos"][0]
        robot = state[..., first : first + ROBOT].clone()
        robot[..., 3:9] = rot6(matrix(robot[..., 3:9]))
        rows = []
        for name in self.names[task_id]:
            body = state[..., self._start(task, name) : self._start(task, name) + BODY]
            spin = (matrix(body[..., 3:9]) @ body[..., 12:15, None])[..., 0]
            rows.append(torch.cat([body[..., :3], rot6(matrix(body[..., 3:9])), body[..., 9:12], spin], dim=-1))
        bodies = torch.stack(rows, dim=-2)
        missing = self.bodies - len(rows)
        if missing:
            pad = bodies.new_zeros(*bodies.shape[:-2], missing, BODY)
            pad[..., :3], pad[..., 3], pad[..., 7] = FAR, 1.0, 1.0
            bodies = torch.cat([bodies, pad], dim=-2)
        return robot, bodies

    def write(self, task_id: int, template: np.ndarray, robot: Tensor, bodies: Tensor) -> np.ndarray:
        """[..., S] float32: `template` [S] or [..., S] with robot [..., 16] and bodies [..., M, 15] put in."""
        task = self.tasks[task_id]
        state = np.broadcast_to(template, (*robot.shape[:-1], template.shape[-1])).astype(np.float32)
        first = task.layout["robot/eef_pos"][0]
        state[..., first : first + ROBOT] = robot.numpy()
        for i, name in enumerate(self.names[task_id]):
            start, body = self._start(task, name), bodies[..., i, :]
            spin = (matrix(body[..., 3:9]).transpose(-1, -2) @ body[..., 12:15, None])[..., 0]
            state[..., start : start + BODY] = torch.cat([body[..., :12], spin], dim=-1).numpy()
        return state

    def context(self, task_id: int, states: np.ndarray, rest: dict[tuple[int, str], float]) -> Context:
        """Context of starts `states` [B, S] of one task; `rest`: heights by (task, body)."""
        task, names = self.tasks[task_id], self.names[task_id]
        n, m, d = len(states), self.bodies, self.others
        rows = lambda x: torch.as_tensor(np.asarray(x))[None].expand(n, *np.shape(x)).contiguous()  # noqa: E731
        present = (np.arange(m) < len(names)).astype(np.float32)
        still = self.still(task)
        target, kind, height = np.arange(m), np.zeros(m, dtype=np.int64), np.zeros(m, dtype=np.float32)
        blocked = np.tile(~np.r_[present > 0, np.arange(d) < len(still)], (m, 1))
        everything = [*names, *[""] * (m - len(names)), *still]
        for i, name in enumerate(names):
            kind[i], height[i] = self.types.index(category(name)), rest.get((task_id, name), 0.0)
            goal = task.targets()[name]
            target[i] = everything.index(goal) if goal is not None else i
            blocked[i, [i, target[i]]] = True
        others, other_kind = torch.full((n, d, 3), FAR), np.zeros(d, dtype=np.int64)
        for j, name in enumerate(still):
            other_kind[j] = self.other_types.index(category(name))
            start = self._start(task, name)
            others[:, j] = torch.as_tensor(states[:, start : start + 3], dtype=torch.float32)
        order = np.asarray(self.order.index(task_id))
        return Context(
            rows(kind),
            rows(order),
            rows(present),
            rows(target),
            rows(height),
            others,
            rows(other_kind),
            rows(blocked * np.float32(1e6)),
        )


def concatenate(contexts: Sequence[Context]) -> Context:
    return Context(*(torch.cat([getattr(c, f.name) for c in contexts]) for f in fields(Context)))


def proprioception(robot: Tensor) -> Tensor:
    """[..., 8] as the environment's `observation.state`: eef position, robosuite axis-angle, 2 finger joints.

    The state's rotation is the grip site's; the hand's body is a quarter turn from it about the approach direction.
    """
    site = matrix(robot[..., 3:9])
    hand = torch.stack([site[..., :, 1], -site[..., :, 0], site[..., :, 2]], dim=-1)
    quat = quaternion(hand)
    quat = quat * torch.where(quat[..., :1] < 0, -1.0, 1.0)  # MuJoCo keeps x > 0 for a hand that points down
    return torch.cat([robot[..., :3], axis_angle(quat), robot[..., 9:11]], dim=-1)
