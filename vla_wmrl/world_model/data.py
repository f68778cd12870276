"""Real trajectories as training windows: what moves is drawn more often, hands that are stuck and near misses most of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_wmrl.world_model.base import OPEN_HAND, Kind, TaskSpec, Trajectory
from vla_wmrl.world_model.scene import Context, Scenes, concatenate

LIFTED = 0.015  # m above its support: the body is held if the hand is also at it
PUSHES, STAYS = 0.25, 0.001  # action units, m a control step: a hand that wants to move and does not stands on something
REACH = 0.10  # m between grip site and body of a held body


@dataclass(frozen=True)
class Item:
    """One trajectory, canonical. T control steps."""

    task_id: int
    kind: Kind
    robot: Tensor  # [T + 1, 16]
    bodies: Tensor  # [T + 1, M, 15]
    first_state: np.ndarray  # [S]
    actions: Tensor  # [T + 1, 7]; row 0 is the action before the first
    progress: Tensor  # [T + 1], NaN where unknown
    success: Tensor  # [T + 1] float, the goal held by then
    held: Tensor  # [T + 1, M] float
    weight: np.ndarray  # [T] how often a window should start here


@dataclass(frozen=True)
class Windows:
    """B windows of H control steps."""

    robot: Tensor  # [B, H + 1, 16]
    bodies: Tensor  # [B, H + 1, M, 15]
    actions: Tensor  # [B, H, 7]
    previous: Tensor  # [B, 7]
    context: Context
    progress: Tensor  # [B, H + 1]
    success: Tensor  # [B, H + 1]
    held: Tensor  # [B, H + 1, M]
    eventual: Tensor  # [B] 1 / 0: the policy's episode succeeds in the end; NaN: not a policy's


@dataclass
class Corpus:
    """Trajectories, growing. `share`: the part of a batch that near misses get when there are any."""

    scenes: Scenes
    share: float = 0.65
    items: list[Item] = field(default_factory=list)
    rest: dict[tuple[int, str], float] = field(default_factory=dict)
    _cache: dict = field(default_factory=dict, repr=False)

    def add(self, traces: Sequence[Any], kind: Kind) -> None:
        """`traces`: anything with the fields of `Trajectory` (sim.rollout.Trace has them)."""
        for trace in traces:
            self._learn_rest(trace, kind)
        self.items += [self._item(trace, kind) for trace in traces]
        self._cache.clear()

    def _learn_rest(self, trace: Any, kind: Kind) -> None:
        """A body's height on its support: the lowest it was ever seen at the start of an episode.

        Near misses start in the middle, where a can may lie on its side: they tell only where nothing else does.
        """
        task = self.scenes.tasks[trace.task_id]
        for name in self.scenes.names[trace.task_id]:
            height = float(trace.states[0, task.layout[f"{name}/pos"][0] + 2])
            key = (trace.task_id, name)
            known = self.rest.get(key, height)
            self.rest[key] = known if kind == "near_miss" else min(height, known)

    def _item(self, trace: Any, kind: Kind) -> Item:
        robot, bodies = self.scenes.read(trace.task_id, trace.states)
        heights = [self.rest[(trace.task_id, n)] for n in self.scenes.names[trace.task_id]]
        heights += [0.0] * (self.scenes.bodies - len(heights))
        high = bodies[..., 2] - torch.tensor(heights) > LIFTED
        held = high & ((bodies[..., :3] - robot[:, None, :3]).norm(dim=-1) < REACH)
        moving = (bodies[1:, :, :3] - bodies[:-1, :, :3]).abs().amax((1, 2)) > 5e-4
        fingers = (robot[1:, 9:11] - robot[:-1, 9:11]).abs().amax(-1) > 5e-4
        actions = torch.as_tensor(np.asarray(trace.actions), dtype=torch.float32)
        stuck = (actions[:, :3].norm(dim=-1) > PUSHES) & ((robot[1:, :3] - robot[:-1, :3]).norm(dim=-1) < STAYS)
        busy = np.convolve((moving | fingers | stuck).numpy().astype(float), np.ones(16))[15:]
        return Item(
            task_id=trace.task_id,
            kind=kind,
            robot=robot,
            bodies=bodies,
            first_state=np.asarray(trace.states[0]),
            actions=torch.as_tensor(np.concatenate([np.asarray(trace.previous)[None], trace.actions]), dtype=torch.float32),
            progress=torch.as_tensor(trace.progress, dtype=torch.float32),
            success=torch.as_tensor(np.maximum.accumulate(trace.success), dtype=torch.float32),
            held=held.float(),
            weight=0.3 + np.minimum(busy / 8, 1.0) + 2.0 * stuck.numpy(),
        )

    def state_dict(self) -> dict[str, Any]:
        """All trajectories, as they are stepped: what a run needs to go on learning from the same data."""
        names = ("robot", "bodies", "actions", "progress", "success", "held")
        return {
            "rest": [[task, name, height] for (task, name), height in sorted(self.rest.items())],
            "meta": [[i.task_id, i.kind, len(i.weight)] for i in self.items],
            "first": [i.first_state for i in self.items],
            "weight": np.concatenate([i.weight for i in self.items]) if self.items else np.zeros(0),
            **{n: torch.cat([getattr(i, n) for i in self.items]) if self.items else torch.zeros(0) for n in names},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest = {(int(task), name): float(height) for task, name, height in state["rest"]}
        self.items, row, step = [], 0, 0
        for (task_id, kind, n), first in zip(state["meta"], state["first"], strict=True):
            cut = {
                k: state[k][row : row + n + 1].clone() for k in ("robot", "bodies", "actions", "progress", "success", "held")
            }
            self.items.append(Item(task_id, kind, first_state=first, weight=state["weight"][step : step + n].copy(), **cut))
            row, step = row + n + 1, step + n
        self._cache.clear()

    def has(self, horizon: int) -> bool:
        """Whether any trajectory is `horizon` steps long."""
        return any(len(item.weight) >= horizon for item in self.items)

    def sample(self, rng: np.random.Generator, batch: int, horizon: int) -> Windows:
        """`batch` windows; trajectories shorter than `horizon` are left out."""
        near = round(batch * self.share) if self._index("near", horizon) is not None else 0
        if self._index("other", horizon) is None:
            near = batch
        picks = []
        for name, count in (("near", near), ("other", batch - near)):
            if count:
                index, cumulative = self._index(name, horizon)
                picks += index[np.minimum(np.searchsorted(cumulative, rng.random(count)), len(index) - 1)].tolist()
        return self.windows(picks, horizon)

    def _index(self, name: str, horizon: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(item, first step) of every window and the cumulative weights, or None without any."""
        if (name, horizon) not in self._cache:
            rows, weights = [], []
            for i, item in enumerate(self.items):
                n = len(item.weight) - horizon + 1
                if (item.kind == "near_miss") == (name == "near") and n > 0:
                    rows.append(np.stack([np.full(n, i), np.arange(n)], 1))
                    # A near miss is short and all of it matters, from its beginning most. An episode begins at rest, as nothing
                    # else in it, and every dream begins there.
                    weights.append(item.weight[:n] + (np.arange(n) == 0) * (2.0 if name == "near" else 8.0))
            made = None
            if rows:
                w = np.concatenate(weights)
                made = (np.concatenate(rows), np.cumsum(w / w.sum()))
            self._cache[(name, horizon)] = made
        return self._cache[(name, horizon)]

    def windows(self, picks: Sequence[tuple[int, int]], horizon: int) -> Windows:
        """Windows at (item, first step)."""

        def cut(name: str) -> Tensor:
            return torch.stack([getattr(self.items[i], name)[t : t + horizon + 1] for i, t in picks])

        actions = cut("actions")
        contexts, order = [], []
        for task_id in sorted({self.items[i].task_id for i, _ in picks}):
            rows = [k for k, (i, _) in enumerate(picks) if self.items[i].task_id == task_id]
            first = np.stack([self.items[picks[k][0]].first_state for k in rows])
            contexts.append(self.scenes.context(task_id, first, self.rest))
            order += rows
        back = torch.as_tensor(np.argsort(order))
        eventual = [float(self.items[i].success[-1]) if self.items[i].kind == "policy" else np.nan for i, _ in picks]
        return Windows(
            robot=cut("robot"),
            bodies=cut("bodies"),
            actions=actions[:, 1:],
            previous=actions[:, 0],
            context=concatenate(contexts).rows(back),
            progress=cut("progress"),
            success=cut("success"),
            held=cut("held"),
            eventual=torch.tensor(eventual),
        )


def load_demonstrations(folder: str | Path) -> tuple[list[TaskSpec], list[Trajectory]]:
    """Traces that `vla-wmrl demos` left in `<folder>/traces`, and their tasks' layouts. Progress may be unknown (NaN).

    The goal of a task is not stored with a trace: the specs have an empty goal and serve to check layouts only.
    """
    specs: dict[int, TaskSpec] = {}
    found = []
    for file in sorted((Path(folder) / "traces").glob("episode_*.npz")):
        data = np.load(file)
        task_id, steps = int(data["task_id"]), len(data["actions"])
        success = np.zeros(steps + 1, dtype=bool)
        success[-1] = bool(data["success"])
        layout = {name: tuple(span) for name, span in json.loads(str(data["layout"])).items()}
        specs.setdefault(task_id, TaskSpec(task_id, "", layout, (), (), (), ()))
        known = data["progress"] if "progress" in data else np.full(steps + 1, np.nan, dtype=np.float32)
        found.append(
            Trajectory(task_id, int(data["init_id"]), data["states"], data["actions"], known, success, OPEN_HAND, "expert")
        )
    return list(specs.values()), found
