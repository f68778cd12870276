"""Stage progress of a LIBERO task, from its own goal predicates and their preconditions.

progress = mean over the goal's conjuncts of p, and 1 exactly when all conjuncts hold. A conjunct that holds has p = 1.
* On / In (object, target): p = 0.2 reach + 0.2 held + 0.2 lift + 0.3 carry, at most 0.9
    reach = 1 - tanh(|hand - object| / 0.10 m), of the one unmet conjunct where p is largest only (the hand is in one place)
    held  = 1 while the object lies between fingers that closed on it
    lift  = held, times the object's height over where it is carried from, up to 0.12 m over the table
    carry = (held or already over the target) times 1 - tanh(horizontal distance to the target / 0.15 m)
* Open / Close / TurnOn / TurnOff (fixture): p = 0.2 reach + 0.7 travel of its joint towards the goal, at most 0.9
"""

from __future__ import annotations

import numpy as np

from sim.view import View

REACH_M, CARRY_M = 0.10, 0.15  # scales of the smooth parts
HELD_DISTANCE_M = 0.07  # from the grip site to the object's origin: mugs and bowls are held at the rim
HELD_WIDTH_M = (0.003, 0.072)  # finger opening around something: neither empty nor open
OVER_M = 0.08  # horizontal distance that counts as over the target
LIFT_M = (0.05, 0.17)  # height of the object's origin over the table: resting, and lifted
# |joint| of a fixture at the far end of the wanted travel, and whether the goal is at 0
TRAVEL = {"microwave": 1.6, "drawer": 0.14, "cabinet": 0.14, "stove": 0.5}


def held(view: View, name: str) -> bool:
    """Whether the object `name` lies between fingers that closed on it."""
    near = np.linalg.norm(view.objects[name].pos - view.eef_pos) < HELD_DISTANCE_M
    return bool(near and HELD_WIDTH_M[0] < view.gripper_width < HELD_WIDTH_M[1])


def progress(view: View) -> float:
    """Progress in [0, 1] of the state in `view`; 1.0 exactly when every conjunct of the goal holds."""
    if all(view.satisfied):
        return 1.0
    unmet = [goal for goal, ok in zip(view.goal, view.satisfied, strict=True) if not ok]
    parts = [_conjunct(view, goal) for goal in unmet]
    furthest = max(range(len(parts)), key=lambda i: sum(parts[i]))
    gained = sum(rest + (reach if i == furthest else 0.0) for i, (reach, rest) in enumerate(parts))
    return float((len(view.goal) - len(unmet) + gained) / len(view.goal))


def _conjunct(view: View, goal: tuple[str, ...]) -> tuple[float, float]:
    """(reach, the rest) of one unmet conjunct, with their weights."""
    predicate, name, *target = goal
    if predicate in ("on", "in"):
        return _placing(view, name, target[0])
    fixture = max((o for o in view.objects if name == o or name.startswith(o + "_")), key=len)
    reach = 0.2 * (1.0 - np.tanh(np.linalg.norm(view.objects[fixture].pos - view.eef_pos) / REACH_M))
    return float(reach), 0.7 * _travel(view, predicate, name)


def _placing(view: View, name: str, target: str) -> tuple[float, float]:
    pos = view.objects[name].pos
    goal = view.regions[target].pos if target in view.regions else view.objects[target].pos
    holding = held(view, name)
    distance = float(np.linalg.norm((goal - pos)[:2]))
    low, high = LIFT_M
    lift = float(np.clip((pos[2] - _table(view) - low) / (high - low), 0.0, 1.0))
    reach = 0.2 * (1.0 - np.tanh(np.linalg.norm(pos - view.eef_pos) / REACH_M))
    carry = (1.0 - np.tanh(distance / CARRY_M)) * float(holding or distance < OVER_M)
    return float(reach), float(0.2 * holding + 0.2 * holding * lift + 0.3 * carry)


def _table(view: View) -> float:
    """Height of the table: of the lowest region that objects start in."""
    starts = [r.pos[2] for name, r in view.regions.items() if name.endswith("init_region")]
    return float(min(starts)) if starts else float(min(p.pos[2] for p in view.objects.values()))


def _travel(view: View, predicate: str, name: str) -> float:
    """Share of the joint's travel that is done."""
    joints = {joint: q for joint, q in view.joints.items() if joint.startswith(name.split("_region")[0]) or name in joint}
    if not joints:
        owner = max((o for o in view.objects if name.startswith(o)), key=len, default=name)
        joints = {joint: q for joint, q in view.joints.items() if joint.startswith(owner)}
    if not joints:
        return 0.0
    span = next((s for kind, s in TRAVEL.items() if kind in name), 1.0)
    away = min(1.0, max(abs(q) for q in joints.values()) / span)
    return 1.0 - away if predicate in ("close", "turnoff") else away
