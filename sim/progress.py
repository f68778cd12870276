"""Stage progress of a LIBERO task, from its own goal predicates and their preconditions.

progress = mean over the goal's conjuncts of p, and 1 exactly when all conjuncts hold. A conjunct that holds has p = 1.
* On / In (object, target): p = 0.2 reach + 0.2 held + 0.2 lift + 0.3 carry, at most 0.9
    reach = 1 - tanh(distance of the hand from the object's bounding box / 0.10 m)
    held  = 1 while the object lies between fingers that closed on it
    lift  = held, times the height of the object's lowest point over the table, up to 0.08 m
    carry = held, times 1 - tanh(horizontal distance to the target / 0.15 m)
  An object over its target (inside its outline, not below it) counts as held and lifted, so that letting go is no loss.
* Open / Close / TurnOn / TurnOff (fixture): p = 0.2 reach + 0.7 travel of its joint towards the goal, at most 0.9;
  reach is to where the joint is worked (knob, drawer handle, door)
The hand is in one place: reach counts only for the unmet conjunct where the rest of p is largest.
"""

from __future__ import annotations

import numpy as np

from sim.expert_fixtures import touch_point
from sim.expert_skills import SHAPES, bounds, category
from sim.view import View

REACH_M, CARRY_M = 0.10, 0.15  # scales of the smooth parts
HELD_MARGIN_M = 0.014  # how far outside the object's bounding box the grip site may be while the fingers hold it
HELD_WIDTH_M = (0.003, 0.072)  # finger opening around something: neither empty nor open
LIFT_M = 0.08
PLATE_M = 0.06  # horizontal distance that counts as over an object (a plate)
UNKNOWN_HALF_M = 0.04  # half size of an object that the table of shapes does not hold
# |joint| of a fixture at the far end of the wanted travel; the other end is 0
TRAVEL = {"microwave": 1.6, "drawer": 0.14, "cabinet": 0.14, "stove": 0.5}


def held(view: View, name: str) -> bool:
    """Whether the object `name` lies between fingers that closed on it."""
    low, high = HELD_WIDTH_M
    return _gap(view, name) < HELD_MARGIN_M and low < view.gripper_width < high


def progress(view: View) -> float:
    """Progress in [0, 1] of the state in `view`; 1.0 exactly when every conjunct of the goal holds."""
    if all(view.satisfied):
        return 1.0
    unmet = [goal for goal, ok in zip(view.goal, view.satisfied, strict=True) if not ok]
    parts = [_conjunct(view, goal) for goal in unmet]
    furthest = max(range(len(parts)), key=lambda i: (parts[i][1], parts[i][0]))
    gained = sum(rest for _, rest in parts) + parts[furthest][0]
    return float((len(view.goal) - len(unmet) + gained) / len(view.goal))


def _conjunct(view: View, goal: tuple[str, ...]) -> tuple[float, float]:
    """(reach, the rest) of one unmet conjunct, with their weights."""
    predicate, name, *target = goal
    if predicate in ("on", "in"):
        return _placing(view, name, target[0])
    fixture = max((o for o in view.objects if name == o or name.startswith(o + "_")), key=len)
    q, travel = _travel(view, predicate, name)
    reach = 1.0 - np.tanh(np.linalg.norm(touch_point(view, fixture, q) - view.eef_pos) / REACH_M)
    return float(0.2 * reach), 0.7 * travel


def _placing(view: View, name: str, target: str) -> tuple[float, float]:
    pos = view.objects[name].pos
    if target in view.regions:
        region = view.regions[target]
        goal, half = region.pos, np.abs(region.mat @ region.size)  # LIBERO's own outline
        over = bool(np.all(np.abs(pos - goal)[:2] < half[:2]) and pos[2] > goal[2] - half[2] - 0.01)
    else:
        goal = view.objects[target].pos
        over = bool(np.linalg.norm((pos - goal)[:2]) < PLATE_M and pos[2] > goal[2])
    holding = over or held(view, name)
    lift = 1.0 if over else float(np.clip((_box(view, name)[0][2] - _table(view)) / LIFT_M, 0.0, 1.0))
    carry = 1.0 - np.tanh(float(np.linalg.norm((goal - pos)[:2])) / CARRY_M)
    reach = 0.2 * (1.0 - np.tanh(_gap(view, name) / REACH_M))
    return float(reach), float(holding * (0.2 + 0.2 * lift + 0.3 * carry))


def _box(view: View, name: str) -> tuple[np.ndarray, np.ndarray]:
    """World-axis bounds of an object."""
    pose, shape = view.objects[name], SHAPES.get(category(name))
    return (pose.pos - UNKNOWN_HALF_M, pose.pos + UNKNOWN_HALF_M) if shape is None else bounds(pose, shape)


def _gap(view: View, name: str) -> float:
    """Distance (m) of the grip site from the object's bounding box, in the object's own frame; 0 inside."""
    pose, shape = view.objects[name], SHAPES.get(category(name))
    local = pose.mat.T @ (view.eef_pos - pose.pos)
    centre, half = (0.0, UNKNOWN_HALF_M) if shape is None else (shape.centre, shape.half)
    return float(np.linalg.norm(np.maximum(np.abs(local - centre) - half, 0.0)))


def _table(view: View) -> float:
    """Height of the table (m): the lowest point of what stands on it."""
    return float(min(_box(view, name)[0][2] for name in view.objects if SHAPES.get(category(name)) is not None))


def _travel(view: View, predicate: str, name: str) -> tuple[float, float]:
    """(position, share of the travel that is done) of a conjunct's joint."""
    stem = name.removesuffix("_region")
    joints = {joint: q for joint, q in view.joints.items() if joint.startswith(stem) or name in joint}
    if not joints:
        owner = max((o for o in view.objects if name.startswith(o)), key=len, default=name)
        joints = {joint: q for joint, q in view.joints.items() if joint.startswith(owner)}
    if not joints:
        return 0.0, 0.0
    span = next((s for kind, s in TRAVEL.items() if kind in name), 1.0)
    q = max(joints.values(), key=abs)
    away = min(1.0, abs(q) / span)
    return q, 1.0 - away if predicate in ("close", "turnoff") else away
