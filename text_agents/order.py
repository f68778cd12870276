"""Which items a training step takes."""

from __future__ import annotations

from collections.abc import Sequence

from vla_wmrl.policies.noise import generator

ORDER = 17  # part of the key of the order


def batch_of[T](items: Sequence[T], step: int, n: int, seed: int) -> list[T]:
    """The n items of update `step` (from 0): each pass has an order of its own; a function of (seed, step) only."""
    chosen = []
    for place in range(step * n, (step + 1) * n):
        passed, index = divmod(place, len(items))
        order = generator((seed, ORDER, passed)).permutation(len(items))
        chosen.append(items[order[index]])
    return chosen
