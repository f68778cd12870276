"""What the training loop needs of a world model, and what a world model needs to know of a task. No simulator here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from vla_wmrl.policies.base import Policy
from vla_wmrl.types import Rollout, Start

CONTROL_S = 0.05  # seconds a control step lasts (20 Hz)
OPEN_HAND = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)  # the action before every episode: stand still, hand open
Kind = Literal["policy", "expert", "near_miss"]


@dataclass(frozen=True)
class TaskSpec:
    """One task's state vector [S] and goal. `layout`: first and last index + 1 of "robot/eef_pos", "<object>/rot", ...

    Rotations are the first two columns of the matrix. `goal`: conjuncts, predicate first: ("in", "butter_1", ...).
    """

    task_id: int
    language: str
    layout: dict[str, tuple[int, int]]
    objects: tuple[str, ...]  # movable
    fixtures: tuple[str, ...]
    joints: tuple[str, ...]
    goal: tuple[tuple[str, ...], ...]

    @property
    def size(self) -> int:
        """S."""
        return max(stop for _, stop in self.layout.values())

    def body(self, name: str) -> str | None:
        """The object or fixture that `name` (itself, or a region of it) belongs to; None for regions of the table."""
        owners = [b for b in (*self.objects, *self.fixtures) if name == b or name.startswith(b + "_")]
        return max(owners, key=len) if owners else None

    def targets(self) -> dict[str, str | None]:
        """Every movable body that a conjunct wants somewhere, with the body it must get to (None: the table)."""
        found: dict[str, str | None] = {}
        for _, *words in self.goal:
            bodies = [self.body(word) for word in words]
            if bodies[0] in self.objects:
                found[bodies[0]] = bodies[1] if len(bodies) > 1 else None
        return found


@dataclass(frozen=True)
class Trajectory:
    """A real trajectory of T control steps: the fields of sim.rollout.Trace, and where it comes from."""

    task_id: int
    init_id: int
    states: np.ndarray  # [T + 1, S] float32
    actions: np.ndarray  # [T, 7] float32
    progress: np.ndarray  # [T + 1] float32, NaN where unknown
    success: np.ndarray  # [T + 1] bool
    previous: np.ndarray  # [7] float32
    kind: Kind = "expert"


@dataclass(frozen=True)
class ImaginedRollout(Rollout):
    """A rollout in a world model, with what the model thinks of it. `success` is `p_success` above the threshold."""

    p_success: float = float("nan")  # P(the goal held at some step)
    previous: np.ndarray = field(default_factory=lambda: np.zeros((0, 7), np.float32))  # [K + 1, 7] the action before each look
    value: float = float("nan")  # P(the episode succeeds in the end | the last state)


class WorldModel(Protocol):
    """Imagines rollouts of a policy from stored states, and learns from real trajectories."""

    def imagine(
        self,
        policy: Policy,
        starts: Sequence[Start],
        members: Sequence[int],
        seed: Sequence[int],
        looks: int,
        stochastic: bool = True,
    ) -> list[ImaginedRollout]: ...

    def observe(self, traces: Sequence[Any], kind: Kind) -> None: ...

    def fit(self, updates: int) -> dict[str, float]: ...

    def state_dict(self, data: bool = False) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
