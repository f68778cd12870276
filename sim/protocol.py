"""The LIBERO evaluation protocol, declared once and printed beside every score.

Order: `reset` -> `set_init_state` -> 10 settle steps -> at most the suite's number of control steps; success at any step.
"""

from __future__ import annotations

import numpy as np

from vla_wmrl.config import base_suite

CONTROL_HZ = 20
ACTION_SIZE = 7  # hand translation, rotation, gripper
SETTLE_STEPS = 10  # not counted against the limit
SETTLE_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
OFFICIAL_STATES = 50
REWORDED = ("lan", "task")  # perturbations of LIBERO-PRO that change the instruction, which is then the bddl file's
CAMERAS = {"observation.images.image": "agentview", "observation.images.image2": "robot0_eye_in_hand"}
STATE_KEY = "observation.state"


def max_steps(suite: str) -> int:
    """Control steps an episode of `suite` may take; a LIBERO-PRO suite (libero_10_swap) has those of the one it perturbs."""
    return MAX_STEPS[base_suite(suite)]


def check_action(action: np.ndarray, where: str, shape: tuple[int, ...] = (ACTION_SIZE,)) -> None:
    """Raises ValueError, beginning with `where`, unless `action` has `shape` and is finite real numbers."""
    if action.shape != shape:
        raise ValueError(f"{where}: an action has shape {shape}, not {action.shape}")
    if action.dtype.kind not in "fiub":
        raise ValueError(f"{where}: an action is real numbers, not {action.dtype}")
    if not np.isfinite(action).all():
        raise ValueError(f"{where}: the action is not finite: {action}")


def axis_angle(quat: np.ndarray) -> np.ndarray:
    """[3] rotation vector of `quat` [4] (xyzw) by robosuite's formula: no sign flip, angle in [0, 2 pi).

    The hand points down, so rotations are near pi and a flip would change the value by 2 pi. Does not change its input.
    """
    w = float(np.clip(quat[3], -1.0, 1.0))
    norm = np.sqrt(1.0 - w * w)
    if np.isclose(norm, 0.0):
        return np.zeros(3)
    return np.asarray(quat[:3], dtype=np.float64) * 2.0 * np.arccos(w) / norm


def describe(suite: str) -> dict[str, object]:
    """The protocol of `suite`, for manifests and reports."""
    return {
        "suite": suite,
        "max_steps": max_steps(suite),
        "settle_steps": SETTLE_STEPS,
        "control_hz": CONTROL_HZ,
        "success": "goal predicates hold at any control step",
        "images": "agentview and robot0_eye_in_hand, robosuite's frames rotated by 180 degrees once",
        "state": "eef position, robosuite axis-angle without sign flip, 2 gripper joints",
        "fixtures": "env.reset() re-samples fixture poses; drawn from a bank of resets by the episode's key",
    }
