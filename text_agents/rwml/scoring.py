"""The reward that a run trains on, by its name in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from text_agents.config import RewardSection
from text_agents.rwml import judges, rewards
from text_agents.rwml.triplets import Triplet

Reward = Callable[[Sequence[str], Sequence[Triplet]], np.ndarray]  # (N outputs, their triplets) -> [N], NaN: absent

# reward.kind -> as what each kind of next state is scored
SCORED_AS: dict[str, dict[str, rewards.Kind]] = {
    "rwml": {"alfworld": "alfworld", "user": "user", "tool": "tool"},
    "embedding": {"alfworld": "alfworld", "user": "user", "tool": "user"},
    "rouge": {"alfworld": "tool", "user": "tool", "tool": "tool"},
}


def make_reward(cfg: RewardSection, embedder: rewards.Embedder, device: str = "cpu") -> Reward:
    """Raises UserError for a judge that is not there or does not answer."""
    if cfg.kind in ("judge_binary", "judge_real"):
        return judges.make_judge(cfg.judge, cfg.kind == "judge_binary", device)
    return by_rule(cfg.kind, embedder, cfg.tau, cfg.tau_user)


def by_rule(kind: str, embedder: rewards.Embedder, tau: float, tau_user: float) -> Reward:
    """A reward without a judge: distances below thresholds, ROUGE, or either by what the next state is."""
    scored_as, taus = SCORED_AS[kind], {"alfworld": tau, "user": tau_user}

    def reward(outputs: Sequence[str], triplets: Sequence[Triplet]) -> np.ndarray:
        kinds = [scored_as[t.kind] for t in triplets]
        return rewards.rewards(outputs, [t.next_state for t in triplets], kinds, embedder, taus)

    return reward
