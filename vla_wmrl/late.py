"""Anchors that run while the policy goes on: those of update t train at update t + lag, with their own importance ratio.

The lag is a number of updates and no deadline: whoever is slow is waited for, so a run depends on no clock, drops no anchor,
and resumes to the same bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vla_wmrl.learner import Learner
from vla_wmrl.types import Start


@dataclass
class Begun:
    """An update's n groups, drawn: the anchors run, the others (and the anchors' twins) are imagined."""

    step: int
    starts: list[Start]  # [n]
    anchor: np.ndarray  # [n] bool
    executing: Future  # of the anchors' rollouts, in order
    imagined: Sequence[tuple[Any, ...]]  # [n]
    weights: list[Tensor]  # of the policy that samples; empty where nothing is late


class LateAnchors:
    """The anchors on their way, oldest first."""

    def __init__(self, lag: int):
        self.lag = lag
        self.waiting: deque[Begun] = deque()

    def exchange(self, begun: Begun) -> Begun | None:
        """Takes in this update's anchors, returns those whose turn it is; None in the first `lag` updates."""
        self.waiting.append(begun)
        return self.waiting.popleft() if len(self.waiting) > self.lag else None

    def state_dict(self) -> dict:
        """Which updates' anchors are on their way, and the policies that sample them. Their rollouts run again on a resume."""
        return {"steps": [b.step for b in self.waiting], "weights": [b.weights for b in self.waiting]}

    def load_state_dict(self, state: dict, learner: Learner, begin: Callable[[int], Begun]) -> None:
        """Begins them again, each with the policy that it had."""
        self.waiting.clear()
        for step, weights in zip(state["steps"], state["weights"], strict=True):
            with learner.lent(weights):
                self.waiting.append(begin(step))
