"""RFT: a policy imitates those of its own episodes that succeeded (RWML's baseline; rejection sampling, arXiv 2308.01825).

Episodes come from the policy as it is at every update, so this is the repeated form (RAFT, 2304.06767); for one round
from the policy that training starts with, use few updates of many games.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from text_agents.imitation import imitate
from text_agents.rl.config import TextRlConfig
from text_agents.rl.episodes import EpisodeRollout
from vla_wmrl.learner import Learner
from vla_wmrl.tracking import Ledger
from vla_wmrl.types import Start


def accepted(groups: Sequence[Sequence[EpisodeRollout]]) -> list[EpisodeRollout]:
    """The shortest success of each group that has one (of equally short ones the first): a task counts once, however easy."""
    return [min(won, key=lambda r: r.steps) for group in groups if (won := [r for r in group if r.success])]


class RejectionSampling:
    """Takes the place of the core's loop: `grpo.n_groups` x `grpo.group_size` episodes, one supervised step on the accepted."""

    def __init__(
        self, cfg: TextRlConfig, learner: Learner, draw: Callable[[int, int], Sequence[Start]], play: Callable[..., list]
    ):
        """draw(step, n) gives the starts, play(starts, size, seed) their groups."""
        self.cfg, self.learner, self.draw, self.play, self.ledger = cfg, learner, draw, play, Ledger()

    def step(self, step: int) -> dict[str, float]:
        """One update; returns its metrics. Without any success there is nothing to imitate, and no step."""
        cfg = self.cfg.grpo
        with self.ledger.phase("execute"):
            groups = self.play(self.draw(step, cfg.n_groups), cfg.group_size, (self.cfg.seed, step))
        every, kept = [r for group in groups for r in group], accepted(groups)
        self.ledger.add_real("anchors", sum(r.steps for r in every))
        metrics = {"success/env": float(np.mean([r.success for r in every])), "rft/accepted": float(len(kept))}
        with self.ledger.phase("update"):
            metrics |= {f"loss/{k}": v for k, v in (imitate(self.learner, kept) if kept else {}).items()}
        return metrics | {"loss/skipped": float(not kept)} | self.ledger.metrics()

    def state_dict(self) -> dict:
        return {"learner": self.learner.state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.ledger.load_state_dict(state["ledger"])
