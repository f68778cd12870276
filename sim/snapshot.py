"""The full state of one simulator."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Snapshot:
    """The full state of a LiberoEnv, without handles: restores in any process that built the same task, bit-equal."""

    physics: np.ndarray  # mjSTATE_INTEGRATION: time, qpos, qvel, warm start, ctrl, ...
    body_pos: np.ndarray  # [nbody, 3] fixtures are moved in the model
    body_quat: np.ndarray  # [nbody, 4]
    memory: dict[str, np.ndarray]  # the controller's
    observation: dict[str, np.ndarray] = field(default_factory=dict)  # the look at this instant, if one was made
    steps: int = 0
    model: int = 0  # checksum of the names of its bodies and joints; 0 where it was not kept
