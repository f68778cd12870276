"""Where groups start: initial states (`episode`), or stored real states spread over the stages of the task (`branch`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

import numpy as np

from sim.libero import Snapshot
from vla_wmrl.types import Start

BINS = 10  # stages of progress that branch starts are spread over
CAPACITY = 600  # starts kept a task, the oldest dropped first
_SCALARS = ("task_id", "init_id", "episode", "look", "split", "progress")


class EpisodeStarts:
    """Initial states of the training split. Tasks take turns; the state is drawn by (seed, step, group)."""

    def __init__(self, task_ids: Sequence[int], init_ids: Sequence[int], split: str, seed: int):
        self.task_ids, self.init_ids, self.split, self.seed = list(task_ids), list(init_ids), split, seed

    def draw(self, step: int, n: int) -> list[Start]:
        rng = np.random.default_rng([17, self.seed, step])
        tasks = [self.task_ids[(step * n + i) % len(self.task_ids)] for i in range(n)]
        return [Start(task, int(rng.choice(self.init_ids)), split=self.split) for task in tasks]

    def extend(self, starts: Iterable[Start]) -> None:
        """Initial states are fixed: what rollouts reach changes nothing."""

    def observe(self, starts: Sequence[Start], contrast: Sequence[bool]) -> None:
        """Initial states are drawn evenly."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class BranchStarts:
    """Real states that rollouts passed through. A draw picks a stage of progress first, then a state of that stage.

    Stages are drawn in proportion to how often groups from there had contrast: a group whose members all fare alike
    teaches nothing (the filter of DAPO 2503.14476, made before the rollouts instead of after).
    """

    def __init__(self, task_ids: Sequence[int], seed: int, capacity: int = CAPACITY):
        self.seed, self.capacity = seed, capacity
        self.bank: dict[int, list[Start]] = {task: [] for task in task_ids}
        self.groups_ = {task: np.zeros((BINS, 2)) for task in task_ids}  # with contrast, all

    def draw(self, step: int, n: int) -> list[Start]:
        """n starts, tasks taking turns. Raises RuntimeError while a task has none."""
        rng = np.random.default_rng([18, self.seed, step])
        tasks = list(self.bank)
        return [self._draw(rng, tasks[(step * n + i) % len(tasks)]) for i in range(n)]

    def _draw(self, rng: np.random.Generator, task: int) -> Start:
        if not self.bank[task]:
            raise RuntimeError(f"no branch start of task {task}: collect some first")
        stage = np.array([_stage(s) for s in self.bank[task]])
        present = np.unique(stage)
        useful, every = self.groups_[task][present].T
        weight = (useful + 1.0) / (every + 2.0)
        chosen = np.flatnonzero(stage == rng.choice(present, p=weight / weight.sum()))
        return self.bank[task][int(rng.choice(chosen))]

    def observe(self, starts: Sequence[Start], contrast: Sequence[bool]) -> None:
        """Whether the rewards of the groups from `starts` differed within the group."""
        for start, differed in zip(starts, contrast, strict=True):
            self.groups_[start.task_id][_stage(start)] += (bool(differed), 1.0)

    def extend(self, starts: Iterable[Start]) -> None:
        """Adds real states; the oldest go when a task is full."""
        for start in starts:
            self.bank[start.task_id].append(start)
        for task, kept in self.bank.items():
            self.bank[task] = kept[-self.capacity :]

    def state_dict(self) -> dict:
        """The bank, as arrays stacked over the starts of a task, and what was seen of its stages."""
        bank = {task: pack(starts) for task, starts in self.bank.items() if starts}
        return {"bank": bank, "groups": {task: seen.copy() for task, seen in self.groups_.items()}}

    def load_state_dict(self, state: dict) -> None:
        for task, packed in state["bank"].items():
            self.bank[int(task)] = unpack(packed)
        self.groups_ = {int(task): np.array(seen) for task, seen in state["groups"].items()}


def _stage(start: Start) -> int:
    return min(int(start.progress * BINS), BINS - 1)


def pack(starts: Sequence[Start]) -> dict:
    """Starts of one task with snapshots and observations, as a dict of stacked arrays."""
    snaps = [s.snapshot for s in starts]
    packed: dict = {name: np.array([getattr(s, name) for s in starts]) for name in _SCALARS if name != "split"}
    packed["split"] = [s.split for s in starts]
    packed["state"] = np.stack([s.state for s in starts])
    packed["previous"] = np.stack([s.previous for s in starts])
    for name in ("physics", "body_pos", "body_quat"):
        packed[name] = np.stack([getattr(s, name) for s in snaps])
    packed["steps"] = np.array([s.steps for s in snaps])
    for name in ("memory", "observation"):
        packed[name] = {k: np.stack([getattr(s, name)[k] for s in snaps]) for k in getattr(snaps[0], name)}
    return packed


def unpack(packed: dict) -> list[Start]:
    """The inverse of `pack`."""
    starts = []
    for i in range(len(packed["state"])):
        arrays = {name: packed[name][i] for name in ("physics", "body_pos", "body_quat")}
        nested = {name: {k: v[i] for k, v in packed[name].items()} for name in ("memory", "observation")}
        snapshot = Snapshot(**arrays, **nested, steps=int(packed["steps"][i]))
        scalars = {name: packed[name][i] for name in _SCALARS}
        kinds = {f.name: {"int": int, "str": str, "float": float}.get(str(f.type)) for f in fields(Start)}
        scalars = {name: kinds[name](value) for name, value in scalars.items()}
        starts.append(Start(**scalars, snapshot=snapshot, state=packed["state"][i], previous=packed["previous"][i]))
    return starts
