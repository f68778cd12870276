"""The tokens of the pipeline language: one for each value of each slot, as the small policy chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from text_agents.autoresearch.pipeline import CLASSIFIERS, COMMON, OUTPUTS, PARAMS, REGRESSORS, TARGETS, slots

MODELS = tuple(dict.fromkeys((*CLASSIFIERS, *REGRESSORS)))


def _pairs() -> list[tuple[str, Any]]:
    values: dict[str, Sequence[Any]] = {**COMMON, "model": MODELS}
    values |= {f"{model}.{name}": options for model, params in PARAMS.items() for name, options in params.items()}
    values |= {"target": TARGETS, "output": [v for options in OUTPUTS.values() for v in options]}
    return [(slot, value) for slot, options in values.items() for value in options]


TOKENS: tuple[tuple[str, Any], ...] = tuple(_pairs())
SLOTS: tuple[str, ...] = tuple(dict.fromkeys(slot for slot, _ in TOKENS))
INDEX = {(slot, repr(value)): i for i, (slot, value) in enumerate(TOKENS)}  # repr: 1 and 1.0 are different values
MAX_CHOICES = len(COMMON) + 3 + max(len(p) for p in PARAMS.values())  # of one specification


def open_slot(kind: str, chosen: Sequence[Any]) -> tuple[int, np.ndarray] | None:
    """(index of the next slot, tokens [k] it allows) after the values `chosen`; None when the walk is complete."""
    found = slots(kind, chosen)
    if found is None:
        return None
    name, values = found
    if name.startswith("params."):
        name = f"{chosen[len(COMMON)]}.{name.removeprefix('params.')}"  # the model comes right after the common slots
    return SLOTS.index(name), np.array([INDEX[name, repr(v)] for v in values])
