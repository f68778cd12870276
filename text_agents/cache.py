"""Keys and values of a conversation in a buffer with room to grow (a CPU is bound by copying them).

transformers' dynamic cache is copied whole for every token that is sampled.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 256  # columns, at least, that a new buffer has left


class Buffer:
    """Room for a tensor [B, H, T, D] that grows along T, and that may be replaced (rows selected) between two appends."""

    _room: torch.Tensor | None = None

    def append(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """`held` with `new` behind it: in place if `held` is the beginning of this buffer, else in a new one."""
        before = held.shape[-2] if held.numel() else 0
        after = before + new.shape[-2]
        room = self._room
        held_here = room is not None and room.data_ptr() == held.data_ptr() and room.shape[:2] == held.shape[:2]
        if not held_here or room.shape[-2] < after:
            batch, heads, _, width = new.shape
            self._room = new.new_empty(batch, heads, after + max(ROOM, after // 4), width)
            if before:
                self._room[:, :, :before] = held
        self._room[:, :, before:after] = new
        return self._room[:, :, :after]


class GrowingLayer(DynamicLayer):
    """A layer whose keys and values [B, H, T, D] are views of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._keys, self._values = Buffer(), Buffer()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Keys and values with those of the new tokens appended."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._keys.append(self.keys, key_states)
        self.values = self._values.append(self.values, value_states)
        return self.keys, self.values


def growing_cache(config: Any) -> DynamicCache:
    """The cache that a model of this config makes for itself, its plain layers growing in place. For sampling: no gradient."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
