"""What flows through a training step: starts, rollouts, groups. Frozen, and with every shape at its definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Source = Literal["real", "imagined"]


@dataclass(frozen=True)
class Start:
    """Where the rollouts of one group begin.

    `look == 0` and `snapshot is None`: an initial state of the task (an *episode* start). Otherwise a *branch* start: a
    real state of the simulator that an earlier anchor, rollout or demonstration passed through.
    """

    task_id: int
    init_id: int  # the initial state it descends from (training ids and official ids live in `split`)
    episode: int = 0  # which rollout from that initial state it was cut from
    look: int = 0  # looks (policy inferences) that had been made by then
    split: str = "train"  # "train" or "official"
    snapshot: Any = field(default=None, repr=False)  # full simulator state, opaque to the core
    state: np.ndarray | None = field(default=None, repr=False)  # [S] float32, the world model's view of it
    progress: float = 0.0  # stage progress in [0, 1] at the start
    previous: np.ndarray | None = field(default=None, repr=False)  # [7] the action that led here; None: settling's
    passed: float = 0.0  # share of the task's milestones that the rollout had passed by then, at its best
    waited: int = 0  # looks since it passed the last of them (or began)

    @property
    def key(self) -> tuple[int, int, int, int]:
        return (self.task_id, self.init_id, self.episode, self.look)


class Outcome(Protocol):
    """What the loop reads of a rollout. The rest is between the policy that made it and the policy that trains on it:
    `Rollout` for policies that act in chunks, token transcripts for language models."""

    success: bool
    steps: int  # of the environment, or of the world model


@dataclass(frozen=True)
class Rollout:
    """One closed-loop rollout of K looks. A look is one policy inference and the control steps of its chunk that ran.

    H is the chunk length, A the (padded) action dimension, N the number of denoising steps, S the state dimension.
    """

    start: Start
    member: int  # index inside the group; part of the noise key
    source: Source
    inputs: dict[str, np.ndarray]  # each [K, ...]: what the policy saw, in the form that re-scores it
    chain: np.ndarray  # [K, N + 1, H, A] float32, denoising chain in normalised action units
    sde_step: np.ndarray  # [K] int64, the stochastic denoising step (-1: all of them)
    executed: np.ndarray  # [K, H] bool, control steps that ran, up to and with the one that succeeded
    states: np.ndarray  # [K + 1, S] float32, at every look and at the end
    progress: np.ndarray  # [K + 1] float32, stage progress in [0, 1]
    success: bool
    terminated: bool  # the task ended (success)
    truncated: bool  # a limit ended it
    steps: int  # control steps that ran

    @property
    def looks(self) -> int:
        return len(self.chain)


@dataclass(frozen=True)
class Group:
    """G rollouts of one policy from one start. One source of training reward per group, decided before it was sampled."""

    group_id: int
    start: Start
    anchor: bool  # real execution: trains on `r_env`; otherwise on the calibrated `r_wm`
    rollouts: tuple[Rollout, ...]  # the ones that train
    twins: tuple[Rollout, ...]  # on anchors with a world model: what it judged, imagined twins (same policy and noise keys)
    # or, where it grades executed rollouts, those
    r_env: np.ndarray  # [G] float64, NaN where absent
    r_wm: np.ndarray  # [G] float64, NaN where absent; on anchors: of the twins


@dataclass(frozen=True)
class RewardStream:
    """Rewards of one source for M groups. A missing reward is absent (NaN and valid False), never 0."""

    group_ids: np.ndarray  # [M] int64
    rewards: np.ndarray  # [M, G] float64
    valid: np.ndarray  # [M, G] bool
