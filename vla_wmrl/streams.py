"""The calibration and the fusion that a config asks for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vla_wmrl.debias import IsotonicDebiaser
from vla_wmrl.fusion import Fusion, Guard


def make_debias(cfg: Any) -> IsotonicDebiaser | None:
    """By the section `debias` of a config; None in arms without calibration."""
    settings = asdict(cfg.debias)
    kind, _ = settings.pop("kind"), settings.pop("wait")  # the loop waits, or does not
    if kind == "none":
        return None
    return IsotonicDebiaser.released() if kind == "released" else IsotonicDebiaser(kind, **settings)


def make_fusion(cfg: Any) -> Fusion:
    """By the sections `fusion` and `guard` of a config."""
    settings, guard = asdict(cfg.fusion), asdict(cfg.guard)
    enabled, window = guard.pop("enabled"), guard.pop("window_groups")
    return Fusion(settings.pop("kind"), **settings, guard=Guard(**guard) if enabled else None, guard_window=window)
