"""The arms of the ablation: what each one fixes in a `TrainConfig`."""

from __future__ import annotations

from collections.abc import Collection

from vla_wmrl.errors import UserError, require

_ISOTONIC = {"debias.kind": ("isotonic", "released")}
_WEIGHTED = {"fusion.kind": ("inverse_variance", "released", "mse", "reliability", "ppi")}
_RAW = {"debias.kind": ("none",), "groups.score": ("reward",)}
_EQUAL = {"fusion.kind": ("none",)}
_UNGUARDED = {"guard.enabled": (False,)}
_REAL = {"anchors.fraction": (1.0,), "world_model.kind": ("none",), "groups.dream_resets": (0,), **_RAW, **_EQUAL, **_UNGUARDED}
_IMAGINED = {"world_model.kind": ("state_space",)}

# dotted field -> values the arm allows, its preset first
ARMS: dict[str, dict[str, tuple]] = {
    "real": {"groups.kind": ("episode",), **_REAL},
    "real_branch": {"groups.kind": ("branch",), **_REAL},
    "wm": {"anchors.fraction": (0.0,), "anchors.minimum": (0,), **_IMAGINED, **_RAW, **_EQUAL, **_UNGUARDED},
    "mix": {**_IMAGINED, **_RAW, **_EQUAL, **_UNGUARDED},
    "debias": {**_IMAGINED, **_ISOTONIC, **_EQUAL, **_UNGUARDED},
    "denoise": {**_IMAGINED, **_RAW, **_WEIGHTED, **_UNGUARDED},
    "wmrl": {**_IMAGINED, **_ISOTONIC, **_WEIGHTED},
}
MIXED_ARMS = ("mix", "debias", "denoise", "wmrl")  # both sources: 0 < anchors.fraction < 1


def table_of(cfg: object) -> dict[str, dict[str, tuple]]:
    """The arms of a config: its class's own `ARMS`, else these."""
    return getattr(type(cfg), "ARMS", ARMS)


def dotted(cfg: object, name: str) -> object:
    for part in name.split("."):
        cfg = getattr(cfg, part)
    return cfg


def apply_arm(cfg, explicit: Collection[str]) -> None:
    """Set what `cfg.arm` fixes, in place. Fields in `explicit` were chosen with the arm: a conflict is a UserError."""
    for name, allowed in table_of(cfg)[cfg.arm].items():
        if dotted(cfg, name) in allowed:
            continue
        if name in explicit:
            _refuse(cfg, name, allowed)
        section, _, key = name.rpartition(".")
        setattr(dotted(cfg, section), key, allowed[0])


def check_arm(cfg) -> None:
    """Raise UserError where a config contradicts its arm."""
    for name, allowed in table_of(cfg)[cfg.arm].items():
        if dotted(cfg, name) not in allowed:
            _refuse(cfg, name, allowed)
    require(
        cfg.arm not in MIXED_ARMS or 0 < cfg.anchors.fraction < 1,
        f"arm={cfg.arm} mixes both sources: anchors.fraction={cfg.anchors.fraction} must lie between 0 and 1",
    )


def _refuse(cfg, name: str, allowed: tuple) -> None:
    choices = " or ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in allowed)
    raise UserError(f"arm={cfg.arm} fixes {name} to {choices}, not {dotted(cfg, name)}: leave {name} out")
