"""The privileged view of one simulator state: what experts, progress and state-space world models read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Pose:
    """Pose of a body in the world frame."""

    pos: np.ndarray  # [3] float64, metres
    quat: np.ndarray  # [4] float64, xyzw
    mat: np.ndarray  # [3, 3] float64, columns are the body's axes


@dataclass(frozen=True)
class Region:
    """A box-shaped site that goal predicates refer to (inside of a basket, a drawer, a spot on the table)."""

    pos: np.ndarray  # [3] float64, centre in the world frame, metres
    mat: np.ndarray  # [3, 3] float64, columns are the box's axes
    size: np.ndarray  # [3] float64, half extents in the box's own frame, metres


@dataclass(frozen=True)
class View:
    """Everything that is true about one state of a LIBERO task. Numbers only: pickles, and no handle on the simulator.

    Non-obvious behaviour: derived quantities (poses, regions) lag the joints by one substep, as in robosuite's own
    observations; `satisfied` is evaluated on them, so it agrees with the simulator's success.
    """

    eef_pos: np.ndarray  # [3] grip site, between the finger tips, world frame
    eef_quat: np.ndarray  # [4] xyzw, of the hand's body (robosuite's robot0_eef_quat)
    eef_mat: np.ndarray  # [3, 3] of the grip site, the frame that OSC_POSE controls; column 2 is the approach direction
    gripper_qpos: np.ndarray  # [2] finger joints, about [0.04, -0.04] open and [0, 0] closed
    gripper_qvel: np.ndarray  # [2]
    objects: dict[str, Pose] = field(repr=False)  # movable objects and fixtures, by bddl name
    regions: dict[str, Region] = field(repr=False)  # sites, by bddl name ("basket_1_contain_region")
    joints: dict[str, float] = field(repr=False)  # fixture joints, by MuJoCo name ("flat_stove_1_button"), rad or m
    goal: tuple[tuple[str, ...], ...]  # conjuncts, predicate first: ("in", "butter_1", "basket_1_contain_region")
    satisfied: tuple[bool, ...]  # the simulator's own verdict, one per conjunct

    @property
    def gripper_width(self) -> float:
        """Distance between the finger joints' positions, 0 (closed) to 0.08 m (open)."""
        return float(self.gripper_qpos[0] - self.gripper_qpos[1])
