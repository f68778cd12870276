"""Noise that depends on nothing but its key, so that resuming, sharding, batching and worker count change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# independent streams of one key
INITIAL, SDE, STEP, LINEAGE = 0, 1, 2, 3


def generator(key: Sequence[int], stream: int = INITIAL) -> np.random.Generator:
    """A counter-based generator (Philox) for `key`, a tuple of integers in [0, 2^64); raises ValueError otherwise.

    The length of the key and both halves of every integer go into the seed: NumPy pads a short entropy with zeros, so
    (1, 2) and (1, 2, 0) would otherwise share their noise.
    """
    words = [stream, len(key)]
    for part in key:
        part = int(part)
        if not 0 <= part < 2**64:
            raise ValueError(f"noise key {tuple(key)}: every part must be an integer in [0, 2^64)")
        words += [part & 0xFFFFFFFF, part >> 32]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def noise(key: Sequence[int], shape: tuple[int, ...], stream: int = INITIAL) -> np.ndarray:
    """Standard normal float32 array of `shape` for `key` (usually (seed, task, init, episode, chunk[, member]))."""
    return generator(key, stream).standard_normal(shape, dtype=np.float32)


def choice(key: Sequence[int], n: int) -> int:
    """A uniform integer in [0, n) for `key`, independent of the key's normal streams."""
    return int(generator(key, STEP).integers(n))


def lineage(*key: int) -> int:
    """A number in [0, 2^62) that stands for `key` wherever a key needs a single part, however long its own history is."""
    return int(generator(key, LINEAGE).integers(2**62))
