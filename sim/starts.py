"""Where groups start: initial states (`episode`), or stored real states spread over the stages of the task (`branch`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

import numpy as np

from sim.libero import Snapshot
from vla_wmrl.types import Start

WAITED = 12  # looks since the last milestone from which starts are no longer told apart
PAIR = 2  # looks that share a bin
CAPACITY = 1500  # starts kept a task, the oldest dropped first
_SCALARS = ("task_id", "init_id", "episode", "look", "split", "progress", "passed", "waited")
Bin = tuple[int, int, int]  # task, milestones in hundredths, pairs of looks since


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

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class BranchStarts:
    """Real states that rollouts passed through. A draw picks a bin first, then a state in it.

    A bin is what the rollout had achieved and how long ago. Bins are drawn in proportion to p (1 - p), where p is how often
    the policy, undisturbed, passed a further milestone from there: where it always does there is nothing to gain (and
    exploration only shows that disturbing it hurts), and where it never does no group has contrast (learnability, Rutherford
    et al., No Regrets, NeurIPS 2024).
    """

    def __init__(self, task_ids: Sequence[int], seed: int, capacity: int = CAPACITY):
        self.seed, self.capacity = seed, capacity
        self.bank: dict[int, list[Start]] = {task: [] for task in task_ids}
        self.seen_: dict[Bin, np.ndarray] = {}  # [2] looks from which a milestone followed, all

    def draw(self, step: int, n: int) -> list[Start]:
        """n starts, tasks taking turns. Raises RuntimeError while a task has none."""
        rng = np.random.default_rng([18, self.seed, step])
        tasks = list(self.bank)
        return [self._draw(rng, tasks[(step * n + i) % len(tasks)]) for i in range(n)]

    def _draw(self, rng: np.random.Generator, task: int) -> Start:
        if not self.bank[task]:
            raise RuntimeError(f"no branch start of task {task}: collect some first")
        of = [_bin(s) for s in self.bank[task]]
        present = sorted(set(of))
        weight = np.array([self.learnability(b) for b in present])
        chosen = present[int(rng.choice(len(present), p=weight / weight.sum()))]
        return self.bank[task][int(rng.choice([i for i, b in enumerate(of) if b == chosen]))]

    def learnability(self, where: Bin) -> float:
        """p (1 - p) of a bin, with one look of either kind assumed before any was seen."""
        followed, every = self.seen_.get(where, np.zeros(2))
        p = (followed + 0.5) / (every + 1.0)
        return float(p * (1.0 - p))

    def extend(self, starts: Iterable[Start]) -> None:
        """Adds real states; the oldest go when a task is full."""
        for start in starts:
            self.bank[start.task_id].append(start)
        for task, kept in self.bank.items():
            self.bank[task] = kept[-self.capacity :]

    def observe(self, starts: Sequence[Start], followed: Sequence[float]) -> None:
        """Whether the undisturbed policy passed a further milestone from `starts` (1, 0; NaN: not known)."""
        for start, passed in zip(starts, followed, strict=True):
            if np.isfinite(passed):
                self.seen_.setdefault(_bin(start), np.zeros(2))[:] += (passed, 1.0)

    def state_dict(self) -> dict:
        """The bank, as arrays stacked over the starts of a task, and what followed from its bins."""
        bank = {task: pack(starts) for task, starts in self.bank.items() if starts}
        return {"bank": bank, "seen": [[*where, *map(float, seen)] for where, seen in sorted(self.seen_.items())]}

    def load_state_dict(self, state: dict) -> None:
        for task, packed in state["bank"].items():
            self.bank[int(task)] = unpack(packed)
        self.seen_ = {(int(a), int(b), int(c)): np.array([f, n]) for a, b, c, f, n in state["seen"]}


def _bin(start: Start) -> Bin:
    return (start.task_id, round(100 * start.passed), min(start.waited, WAITED) // PAIR)


def pack(starts: Sequence[Start]) -> dict:
    """Starts of one task as a dict of stacked arrays: all with snapshots and observations, or all without (dreamt)."""
    packed: dict = {name: np.array([getattr(s, name) for s in starts]) for name in _SCALARS if name != "split"}
    packed["split"] = [s.split for s in starts]
    packed["state"] = np.stack([s.state for s in starts])
    packed["previous"] = np.stack([s.previous for s in starts])
    if starts[0].snapshot is None:
        return packed
    snaps = [s.snapshot for s in starts]
    for name in ("physics", "body_pos", "body_quat"):
        packed[name] = np.stack([getattr(s, name) for s in snaps])
    for name in ("steps", "model"):
        packed[name] = np.array([getattr(s, name) for s in snaps])
    for name in ("memory", "observation"):
        packed[name] = {k: np.stack([getattr(s, name)[k] for s in snaps]) for k in getattr(snaps[0], name)}
    return packed


def unpack(packed: dict) -> list[Start]:
    """The inverse of `pack`."""
    starts = []
    for i in range(len(packed["state"])):
        snapshot = None
        if "physics" in packed:
            arrays = {name: packed[name][i] for name in ("physics", "body_pos", "body_quat")}
            nested = {name: {k: v[i] for k, v in packed[name].items()} for name in ("memory", "observation")}
            snapshot = Snapshot(
                **arrays, **nested, steps=int(packed["steps"][i]), model=int(packed["model"][i]) if "model" in packed else 0
            )
        scalars = {name: packed[name][i] for name in _SCALARS}
        kinds = {f.name: {"int": int, "str": str, "float": float}.get(str(f.type)) for f in fields(Start)}
        scalars = {name: kinds[name](value) for name, value in scalars.items()}
        starts.append(Start(**scalars, snapshot=snapshot, state=packed["state"][i], previous=packed["previous"][i]))
    return starts
