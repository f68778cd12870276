"""What a rollout is worth: success of an episode; progress, stage or milestones at the end of a branch.

The start's own progress is a constant of the group, which the baseline removes. `progress` pays for coming closer by any
way, also for descending before the hand is over the object, and gives every group a spread, most of it noise; `stage`
leaves out what happens inside a tenth; `milestone` pays for picked-up objects and goals that hold, and for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from vla_wmrl.types import Rollout

# A conjunct's own progress from which its object is in the hand and lifted (0.2 reach + 0.2 held + 0.7 of 0.2 lift), or its
# joint half way: see sim.progress.
PICKED_UP = 0.54


def episode_reward(rollout: Rollout) -> float:
    """Sparse success, as the benchmark counts it."""
    return float(rollout.success)


def milestones(progress: float, conjuncts: int) -> float:
    """Share in [0, 1] of the milestones that `progress` has passed: two a conjunct of the goal, picked up and done."""
    passed = sum(progress * conjuncts >= k + at - 1e-6 for k in range(conjuncts) for at in (PICKED_UP, 1.0))
    return passed / (2 * conjuncts)


def branch_reward(kind: str, conjuncts: Mapping[int, int]) -> Callable[[Rollout], float]:
    """The reward `kind` of a branch; `conjuncts` of every task's goal."""

    def progress(rollout: Rollout) -> float:
        return float(rollout.progress[-1])

    def stage(rollout: Rollout) -> float:
        return math.floor(10.0 * progress(rollout) + 1e-6) / 10.0

    def milestone(rollout: Rollout) -> float:
        return milestones(progress(rollout), conjuncts[rollout.start.task_id])

    return {"progress": progress, "stage": stage, "milestone": milestone}[kind]
