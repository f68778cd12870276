"""From a metric's score to what is reported: HumanRank, relative performance gap, medals, and the reward ladder. Pure.

Sources: MLE-Dojo (HumanRank), DSBench (relative performance gap), MLE-bench (medals), WMRL (reward ladder).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from vla_wmrl.world_model.language import LADDER, STATUSES, VALID_FLOOR, Status

__all__ = ["STATUSES", "Status", "around", "human_rank", "medal", "performance_gap", "position", "reward", "trajectory_reward"]
Medal = Literal["gold", "silver", "bronze"]


def position(score: float, board: np.ndarray, higher_is_better: bool) -> int:
    """1 + the number of entries of board [N] that are strictly better; N + 1 is worse than everyone."""
    better = board > score if higher_is_better else board < score
    return 1 + int(np.sum(better))


def around(score: float, board: np.ndarray, higher_is_better: bool, n: int = 3) -> str:
    """The board's first entry, up to n entries before and after the place of `score`, and `score` itself, as lines."""
    ranked = np.sort(board)[::-1] if higher_is_better else np.sort(board)
    at = position(score, board, higher_is_better) - 1
    shown = sorted({0, *range(max(0, at - n), min(len(ranked), at + n))})
    lines = [(place + 1 + (place >= at), f"{ranked[place]:.6g}", "") for place in shown]
    lines.append((at + 1, f"{score:.6g}", "  <- this one"))
    return "\n".join(f"{place:6d}  {value:>12s}{mark}" for place, value, mark in sorted(lines))


def human_rank(score: float, boards: Mapping[str, np.ndarray], higher_is_better: bool) -> float:
    """Mean over the boards of (N - position + 1) / N, in [0, 1]: 1 is first, 0 behind everyone (MLE-Dojo)."""
    if not np.isfinite(score) or not boards:
        return float("nan")
    return float(np.mean([1.0 - (position(score, b, higher_is_better) - 1) / len(b) for b in boards.values()]))


def performance_gap(score: float, baseline: float, best: float) -> float:
    """max(0, (score - baseline) / (best - baseline)), 0 for NaN; 1 is the best human, and may be passed (DSBench).

    The direction of the metric is the sign of best - baseline. Raises ValueError where the two are equal.
    """
    if best == baseline:
        raise ValueError("performance_gap: best and baseline are equal")
    gap = (score - baseline) / (best - baseline)
    return max(0.0, float(gap)) if np.isfinite(gap) else 0.0


def medal_places(n: int) -> dict[Medal, int]:
    """The last place that earns each medal among n teams (Kaggle's rule, as MLE-bench grades it)."""
    if n < 100:
        places = (int(0.1 * n), int(0.2 * n), int(0.4 * n))
    elif n < 250:
        places = (10, int(0.2 * n), int(0.4 * n))
    elif n < 1000:
        places = (10 + int(0.002 * n), 50, 100)
    else:
        places = (10 + int(0.002 * n), int(0.05 * n), int(0.1 * n))
    return dict(zip(("gold", "silver", "bronze"), (max(1, p) for p in places), strict=True))


def medal(score: float, board: np.ndarray, higher_is_better: bool) -> Medal | None:
    """The best medal whose last placed entry of board [N] the score reaches; None without."""
    ranked = np.sort(board)[::-1] if higher_is_better else np.sort(board)
    for name, place in medal_places(len(board)).items():
        threshold = ranked[place - 1]
        if score >= threshold if higher_is_better else score <= threshold:
            return name
    return None


def reward(status: Status, rank: float = float("nan")) -> float:
    """The reward ladder (WMRL): 0, 0.1, 0.2, or 0.5 + 0.5 * HumanRank; NaN for what nobody graded, never 0."""
    if status == "valid":
        return VALID_FLOOR + (1.0 - VALID_FLOOR) * rank
    return LADDER.get(status, float("nan"))


def trajectory_reward(rewards: Sequence[float]) -> float:
    """The best turn's reward; turns that nobody graded are left out, NaN where none was."""
    graded = [r for r in rewards if np.isfinite(r)]
    return max(graded) if graded else float("nan")
