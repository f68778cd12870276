"""A distance threshold for an embedder: how well does "nearer than tau_d" tell the true next state from another one?

Precision is measured on pairs that should count (a state against itself retold, or itself) and on two kinds that should
not: a state against one that came at another time, and against itself without what is seen in it, which is what a model
predicts that knows the phrases and no facts. The proposal is the largest threshold that keeps the precision asked for
against each kind. (Against the first kind alone it was 0.35 with MiniLM; half of the second kind lies below 0.32.)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from vla_wmrl.errors import require
from vla_wmrl.tracking import plain, write_json


@dataclass(frozen=True)
class Threshold:
    tau: float | None  # None: no threshold is precise enough
    precision: float  # of pairs nearer than tau, the share that should count (equal numbers of both)
    recall: float  # of pairs that should count, the share nearer than tau
    false_positive_rate: float  # of pairs that should not count, the share nearer than tau
    pairs: int


def curve(same: np.ndarray, other: np.ndarray, taus: np.ndarray) -> dict[str, np.ndarray]:
    """Recall, false positives and precision [T] at thresholds [T], from distances of pairs of both kinds.

    Precision weighs both kinds equally, however many there are of each; NaN where nothing is nearer.
    """
    recall = (same[None, :] < taus[:, None]).mean(axis=1)
    false = (other[None, :] < taus[:, None]).mean(axis=1)
    with np.errstate(invalid="ignore"):
        precision = recall / (recall + false)
    return {"tau": taus, "recall": recall, "false_positive_rate": false, "precision": precision}


def propose(same: np.ndarray, other: np.ndarray, precision: float = 0.95, step: float = 0.01) -> Threshold:
    """The largest threshold (a multiple of `step`, at most 0.5) with at least this precision.

    0.5: above it rewards are for generic descriptions (RWML, Table A2).
    """
    require(len(same) > 0 and len(other) > 0, "calibration needs pairs of both kinds: more triplets")
    require(0.5 < precision <= 1.0, f"precision={precision} must lie in (0.5, 1]")
    taus = np.round(np.arange(step, 0.5 + step / 2, step), 6)
    found = curve(same, other, taus)
    enough = np.flatnonzero(found["precision"] >= precision)
    pairs = len(same) + len(other)
    if len(enough) == 0:
        return Threshold(None, float("nan"), 0.0, 0.0, pairs)
    i = enough[-1]
    values = (float(found[name][i]) for name in ("tau", "precision", "recall", "false_positive_rate"))
    return Threshold(*values, pairs)


def shuffled_pairs(states: Sequence[str], rng: np.random.Generator, n: int) -> list[tuple[str, str]]:
    """n pairs of different states, drawn without looking at how near they are."""
    different = sorted(set(states))
    require(len(different) >= 2, "calibration needs at least two different states")
    first = rng.integers(len(different), size=n)
    second = (first + 1 + rng.integers(len(different) - 1, size=n)) % len(different)
    return [(different[i], different[j]) for i, j in zip(first, second, strict=True)]


def retold(state: str, rng: np.random.Generator) -> str:
    """A state in other words with the same content, for pairs that should count: phrases exchanged, lists reordered."""
    text = state
    for old, new in PHRASES:
        if old in text and rng.random() < 0.7:
            text = text.replace(old, new)
    head, see, tail = text.partition("you see ")
    items = [item.removeprefix("and ") for item in tail.rstrip(".").split(", ")]
    if see and len(items) > 1 and "\n" not in tail:
        text = head + see + ", ".join(items[i] for i in rng.permutation(len(items))) + "."
    return text


PHRASES = (
    ("You arrive at", "You are now at"), ("You pick up the", "You take the"), ("You move the", "You put the"),
    ("Nothing happens.", "That does nothing."), ("In it, you see", "Inside it, you see"),
    ("You open the", "You have opened the"),
    ("is closed.", "is shut."),
)  # fmt: skip


def hollow(state: str) -> str | None:
    """A state with its phrases and without what is seen in it; None where nothing is seen."""
    head, see, tail = state.partition("you see ")
    return f"{head}{see}nothing." if see and not tail.startswith("nothing") else None


def measure(states: Sequence[str], embedder, pairs: int, precision: float, seed: int = 0) -> tuple[Threshold, dict]:
    """(proposal, what it rests on): distances of states to themselves in other words, to other states, and hollowed."""
    rng = np.random.default_rng(seed)
    different = sorted(set(states))
    other = shuffled_pairs(different, rng, pairs)
    same = [(s, retold(s, rng)) for s in (different[i] for i in rng.integers(len(different), size=pairs))]
    changed = [pair for pair in same if pair[0] != pair[1]]
    hollowed = [(s, hollow(s)) for s in different if hollow(s) is not None][:pairs]
    distances = {"retold": embedder.distances(*zip(*(changed or same), strict=True))}
    distances["other"] = embedder.distances(*zip(*other, strict=True))
    if hollowed:
        distances["hollow"] = embedder.distances(*zip(*hollowed, strict=True))
    quantiles = (0.05, 0.25, 0.5, 0.75, 0.95)
    facts: dict = {"states": len(different)}
    for kind, found in distances.items():
        facts[f"{kind}_pairs"] = len(found)
        facts[f"{kind}_distance_quantiles"] = dict(
            zip(map(str, quantiles), np.quantile(found, quantiles).round(4), strict=True)
        )
    proposals = [propose(distances["retold"], distances[kind], precision) for kind in ("other", "hollow") if kind in distances]
    return min(proposals, key=lambda p: -1.0 if p.tau is None else p.tau), facts


def main(cfg) -> None:
    from text_agents.rwml import triplets
    from text_agents.rwml.rewards import Embedder

    states = [t.next_state for t in triplets.read(cfg.triplets, cfg.split) if t.kind != "tool"]
    require(len(set(states)) >= 2, f"{cfg.triplets} has fewer than two different states: collect more triplets")
    found, facts = measure(states, Embedder(cfg.embedder), cfg.pairs, cfg.precision, cfg.seed)
    result = {"embedder": cfg.embedder, "precision_wanted": cfg.precision, "proposal": asdict(found)} | facts
    if cfg.output:
        write_json(cfg.output, result)
    print(json.dumps(plain(result), indent=1))
