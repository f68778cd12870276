"""Which share of a model's weights training has changed, by layer and module.

RWML (arXiv 2602.05842, s4.2, appendix E) with the definition of "The path not taken" (2511.08567): a weight w became v with
|v - w| > eta max(|w|, |v|), eta = 1e-3, both finite and not zero. Numbers of bfloat16 are 2^-8 = 4e-3 of their size apart,
so there this counts every weight of which a bit changed; compare models in one dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

ETA = 1e-3
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.(.+)$")


def changed(before: Tensor, after: Tensor, eta: float = ETA) -> tuple[int, int]:
    """(weights that changed, weights that are finite and not zero in both), of two tensors of one shape and dtype."""
    counted = before.isfinite() & after.isfinite() & (before != 0) & (after != 0)
    w, v = before.double(), after.double()
    return int((counted & ((v - w).abs() > eta * torch.maximum(w.abs(), v.abs()))).sum()), int(counted.sum())


def place_of(name: str) -> tuple[int | None, str]:
    """(layer or None, module) of a weight: "model.layers.3.self_attn.q_proj.weight" is (3, "q_proj")."""
    found = _LAYER.search(name)
    parts = (found.group(2) if found else name).split(".")
    return (int(found.group(1)) if found else None), parts[-2] if len(parts) > 1 else parts[0]


def change_ratios(before: Mapping[str, Tensor], after: Mapping[str, Tensor], eta: float = ETA) -> list[dict]:
    """A row a weight tensor: name, layer, module, weights counted, changed, ratio. Raises ValueError for different models."""
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(f"the models have different weights: {', '.join(odd[:3])}")
    rows = []
    for name, w in before.items():
        v = after[name]
        if w.shape != v.shape or w.dtype != v.dtype:
            raise ValueError(f"{name}: {tuple(w.shape)} {w.dtype} before, {tuple(v.shape)} {v.dtype} after")
        layer, module = place_of(name)
        count, n = changed(w, v, eta)
        rows.append({"name": name, "layer": layer, "module": module, "weights": n, "changed": count})
    return rows


def pooled(rows: list[dict], key: str) -> dict[str, float]:
    """Share of changed weights by a row's `key` ("layer", "module"), in the order of first appearance."""
    out = {}
    for value in dict.fromkeys(row[key] for row in rows):
        own = [row for row in rows if row[key] == value]
        n = sum(row["weights"] for row in own)
        out["outside layers" if value is None else str(value)] = sum(r["changed"] for r in own) / n if n else float("nan")
    return out
