"""Step-level advantages of a group of episodes by states they share (GiGPO, arXiv 2505.10978). Pure.

A step group holds all turns of a group's episodes at which the same observation was seen (its *anchor state*; another use of
the word than WMRL's anchors). The return of a turn is the episode's reward, discounted by the turns that were left:

    R_t = gamma^(T - 1 - t) r        A_t = R_t - mean over the step group [/ its std]

Non-obvious behaviour
* A state that one turn saw has no one to compare with: 0. So has a turn of an episode without reward (NaN).
* An episode that comes to a state again and again counts there as often (so in verl-agent); with gamma = 1 its turns there
  are worth the same.
* With gamma < 1 a group whose episodes all succeed has contrast, too: shorter ways are better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_wmrl.advantage import group_advantages


def returns(rewards: np.ndarray, lengths: Sequence[int], gamma: float) -> list[np.ndarray]:
    """Returns [T_i] float64 of every turn of G episodes with rewards [G] at their ends."""
    return [r * gamma ** np.arange(n - 1, -1, -1.0) for r, n in zip(rewards, lengths, strict=True)]


def step_advantages(
    rewards: np.ndarray, observations: Sequence[Sequence[str]], gamma: float = 0.95, scale: str = "none"
) -> list[np.ndarray]:
    """G arrays [T_i] float64, from rewards [G] (NaN: absent) and what each turn saw before it acted.

    scale: "none" centres within the step group, "std" also divides by its standard deviation.
    """
    values = np.concatenate(returns(np.asarray(rewards, np.float64), [len(o) for o in observations], gamma))
    places: dict[str, list[int]] = {}
    for i, seen in enumerate(text for episode in observations for text in episode):
        places.setdefault(" ".join(seen.split()), []).append(i)
    found = np.zeros(len(values))
    for where in places.values():
        group = values[where][None]
        found[where] = group_advantages(group, np.isfinite(group), scale)[0][0]
    return np.split(found, np.cumsum([len(o) for o in observations])[:-1])
