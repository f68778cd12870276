"""What a rollout is worth: success of an episode; progress, stage or milestones of a branch.

The start's own progress is a constant of the group, which the baseline removes. `progress` pays for coming closer by any
way, also for descending before the hand is over the object, and gives every group a spread, most of it noise; `stage`
leaves out what happens inside a tenth; `milestone` pays for picked-up objects and goals that hold at the end, and for nothing
else; `next` pays 1 for passing a milestone that the rollout had not passed before, whenever in the branch that is.

A world model can say more than pass or fail: `margin`, how far beyond the next milestone a branch came at its best, or how
far it stayed below. As a score that the calibration turns into the chance of passing for real, it tells near misses apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vla_wmrl.types import Rollout, Start

# A conjunct's own progress from which its object is in the hand and lifted (0.2 reach + 0.2 held + 0.7 of 0.2 lift), or its
# joint half way: see sim.progress.
PICKED_UP = 0.54


def episode_reward(rollout: Rollout) -> float:
    """Sparse success, as the benchmark counts it."""
    return float(rollout.success)


def next_milestone(start: Start, conjuncts: int) -> float:
    """Progress in [0, 1] at which the first milestone lies that `start` has not passed; 1 when it passed all."""
    every = [(k + at) / conjuncts for k in range(conjuncts) for at in (PICKED_UP, 1.0)]
    return every[min(round(2 * conjuncts * start.passed), len(every) - 1)]


def milestones(progress: float, conjuncts: int) -> float:
    """Share in [0, 1] of the milestones that `progress` has passed: two a conjunct of the goal, picked up and done."""
    passed = sum(progress * conjuncts >= k + at - 1e-6 for k in range(conjuncts) for at in (PICKED_UP, 1.0))
    return passed / (2 * conjuncts)


def passes(start: Start, progress: float, conjuncts: int) -> bool:
    """Whether `progress` is past a milestone that the rollout from which `start` was cut had not passed."""
    return milestones(progress, conjuncts) > start.passed + 1e-6


def branch_reward(kind: str, conjuncts: Mapping[int, int]) -> Callable[[Rollout], float]:
    """The reward `kind` of a branch; `conjuncts` of every task's goal."""

    def progress(rollout: Rollout) -> float:
        return float(rollout.progress[-1])

    def stage(rollout: Rollout) -> float:
        return math.floor(10.0 * progress(rollout) + 1e-6) / 10.0

    def milestone(rollout: Rollout) -> float:
        return milestones(progress(rollout), conjuncts[rollout.start.task_id])

    def following(rollout: Rollout) -> float:
        best = max(float(p) for p in rollout.progress[1:])
        return float(passes(rollout.start, best, conjuncts[rollout.start.task_id]))

    return {"progress": progress, "stage": stage, "milestone": milestone, "next": following}[kind]


def branch_margin(conjuncts: Mapping[int, int]) -> Callable[[Rollout], float]:
    """Best progress of a branch after its start over the next milestone, in conjuncts: >= 0 exactly where `next` pays."""

    def margin(rollout: Rollout) -> float:
        goals = conjuncts[rollout.start.task_id]
        best = max(float(p) for p in rollout.progress[1:])
        return goals * (best - next_milestone(rollout.start, goals)) + 1e-6

    return margin


def mark(starts: Sequence[Start], path: Sequence[float], conjuncts: int) -> list[Start]:
    """`starts`, cut at successive looks of one rollout, with `passed` and `waited` filled in; the first's are kept.

    path: progress at every look of the rollout, at least as long as `starts`.
    """
    if not starts:
        return []
    passed, waited, marked = starts[0].passed, starts[0].waited, [starts[0]]
    for start, progress in zip(starts[1:], path[1:], strict=False):
        now = milestones(float(progress), conjuncts)
        passed, waited = (now, 0) if now > passed + 1e-6 else (passed, waited + 1)
        marked.append(replace(start, passed=passed, waited=waited))
    return marked


def passes_next(path: Sequence[float], conjuncts: int, looks: int) -> np.ndarray:
    """[K] for each look of a rollout with progress `path` [K + 1]: 1 if it passed a further milestone within `looks`, 0 if
    not, NaN where the rollout ended (unsuccessful) before that was decided."""
    now = np.maximum.accumulate([milestones(float(p), conjuncts) for p in path])
    found = np.full(len(now) - 1, np.nan)
    for t in range(len(found)):
        end = min(t + looks, len(now) - 1)
        if now[end] > now[t] + 1e-6:
            found[t] = 1.0
        elif end == t + looks:
            found[t] = 0.0
    return found
