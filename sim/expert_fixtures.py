"""Skills of the scripted expert for things with joints: a stove's knob, a drawer, a microwave and its door."""

from __future__ import annotations

import numpy as np

from sim.expert_skills import (
    CLOSE,
    FULLY_OPEN,
    LEAN,
    OPEN,
    between_fingers,
    downward,
    grasp_of,
    grip,
    move,
)
from sim.view import View

X, Y, _ = np.eye(3)
KNOB_ANGLE = -3.009  # rad, direction of the knob's long end in the stove's frame when its joint is at 0
KNOB_HEIGHT = 0.050  # m, of that end over the stove's origin
HINGE = np.array([-0.172, -0.088, 0.096])  # m, of the microwave's door, in the microwave's frame
DOOR_TOP = 0.189  # m, over the microwave's origin
DOOR_REACH = 0.17  # m from the hinge, where the door is pushed
DRAWER_FACE, DRAWER_LOW = -0.109, 0.041  # m, y and z of the bottom drawer's handle in the cabinet's frame, closed


def touch_point(view: View, fixture: str, q: float) -> np.ndarray:
    """[3] where a hand works the joint of `fixture` at `q`: door, drawer handle, else the fixture's origin."""
    pose = view.objects[fixture]
    kind = fixture.rsplit("_", 1)[0]
    if kind == "microwave":
        return pose.pos + pose.mat @ (HINGE + DOOR_REACH * np.array([np.cos(q), np.sin(q), 0.0]))
    if kind == "white_cabinet":
        return pose.pos + pose.mat @ np.array([0.0, DRAWER_FACE + q, DRAWER_LOW])
    return pose.pos


def turn_knob(view: View, stove: str) -> np.ndarray:
    """Turns the stove on: closed fingers behind the knob's long end push it round (its joint grows towards "on")."""
    e, pose = view.eef_pos, view.objects[stove]
    angle = view.joints[f"{stove}_button"] + KNOB_ANGLE

    def point(turn: float, along: float, behind: float) -> np.ndarray:
        u = np.array([np.cos(angle + turn), np.sin(angle + turn), 0.0])
        t = np.array([-u[1], u[0], 0.0])  # the way it turns
        return pose.pos + pose.mat @ (along * u - behind * t + [0, 0, KNOB_HEIGHT - 0.018])

    start = point(0.0, 0.038, 0.058)
    r = pose.mat.T @ (e - pose.pos)
    u, t = np.array([np.cos(angle), np.sin(angle)]), np.array([-np.sin(angle), np.cos(angle)])
    along, ahead = r[:2] @ u, r[:2] @ t
    if r[2] < KNOB_HEIGHT - 0.002 and 0.012 < along < 0.065 and -0.075 < ahead < -0.01:
        push = point(0.7, 0.038, 0.025) - e
        # The hand turns along: torsional friction of LIBERO's contacts would make a hand that does not hold the knob.
        mat = downward(view, pose.mat @ np.array([np.cos(angle + 2.1), np.sin(angle + 2.1), 0.0]))
        push[:2] *= 0.1 / np.linalg.norm(push[:2])  # with all force: the knob is stiff
        return move(view, e + push, CLOSE, mat)
    return move(view, _from_above(e, start, pose.pos[2] + KNOB_HEIGHT + 0.05), CLOSE, downward(view, pose.mat @ Y))


def close_drawer(view: View, cabinet: str, joint: str) -> np.ndarray:
    """Pushes the bottom drawer in at its handle, with closed fingers that lean forward under the handles above."""
    e, pose = view.eef_pos, view.objects[cabinet]
    lean = pose.mat @ (LEAN * Y)
    mat = downward(view, pose.mat @ X, lean)
    r = pose.mat.T @ (e - pose.pos)
    face, low = DRAWER_FACE + view.joints[joint], DRAWER_LOW
    if r[1] < face - 0.004 and abs(r[0] - 0.02) < 0.035 and abs(r[2] - low) < 0.02:
        return move(view, pose.pos + pose.mat @ np.array([0.02, r[1] + 0.06, low]), CLOSE, mat)
    start = pose.pos + pose.mat @ np.array([0.02, face - 0.07, low])
    return move(view, _from_above(e, start, pose.pos[2] + 0.17), CLOSE, mat)


def close_door(view: View, microwave: str, joint: str) -> np.ndarray:
    """Pushes the microwave's door shut from outside, closed fingers following it round its hinge."""
    e, pose, q = view.eef_pos, view.objects[microwave], view.joints[joint]
    hinge = pose.pos + pose.mat @ HINGE

    def point(turn: float, along: float, outside: float) -> np.ndarray:
        a = min(q + turn, 0.05)
        c, s = np.cos(a), np.sin(a)
        return hinge + pose.mat @ np.array([along * c + outside * s, along * s - outside * c, 0.05])

    r = pose.mat.T @ (e - hinge)
    along, outside = r[0] * np.cos(q) + r[1] * np.sin(q), r[0] * np.sin(q) - r[1] * np.cos(q)
    mat = downward(view, pose.mat @ np.array([np.cos(q), np.sin(q), 0.0]))
    if outside > 0.005 and outside < 0.12 and 0.08 < along < 0.26 and r[2] < 0.1:
        return move(view, point(0.35, DOOR_REACH, 0.01), CLOSE, mat)
    return move(view, _from_above(e, point(0.0, DOOR_REACH, 0.075), pose.pos[2] + DOOR_TOP + 0.05), CLOSE, mat)


def into_microwave(view: View, mug: str, microwave: str) -> np.ndarray:
    """A mug into the microwave, handle last, the hand leaning so that it stays outside."""
    e, box, pose = view.eef_pos, view.objects[microwave], view.objects[mug]
    inside = box.pos + box.mat @ np.array([-0.003, -0.060, 0.028])  # of the mug's origin; the door is on the other side
    d = inside - pose.pos
    grasp = grasp_of(view, mug, "handle")
    mat = downward(view, box.mat @ X, box.mat @ (LEAN * Y))
    held_here = between_fingers(view, mug, "handle") and view.gripper_width < FULLY_OPEN
    if held_here and abs(d[0]) < 0.03 and d[1] < 0.012 and d[2] > -0.012:
        return move(view, e, OPEN, mat)
    held, action = grip(view, mug, grasp, "handle")
    if not held:
        return action
    front = box.pos[1] - 0.088 - 0.085  # the mug's origin stays this far out until it is lined up
    lined_up = abs(d[0]) < 0.015 and abs(d[2] + 0.012) < 0.012 and abs(pose.mat[:, 0] @ Y) > 0.97
    if pose.pos[1] > front + 0.03 or (lined_up and pose.pos[1] > front - 0.03):
        return move(view, e + d + [0, 0, 0.012 if d[1] > 0.012 else 0.0], CLOSE, mat)
    aside = 0.035 if pose.pos[1] < front - 0.04 else 0.0  # past the tip of a door that is barely open
    return move(view, e + np.array([d[0] + aside, front - pose.pos[1], d[2] + 0.012]), CLOSE, mat)


def _from_above(e: np.ndarray, start: np.ndarray, travel: float) -> np.ndarray:
    """Waypoint on the way from `e` to `start` that goes up to `travel` height (m), across, and down."""
    d = start - e
    far = float(np.linalg.norm(d[:2]))
    if far < 0.012 or (far < 0.03 and e[2] < start[2] + 0.05):
        return start
    target = np.array([start[0], start[1], max(travel, start[2])])
    low = target[2] - 0.02 - e[2]
    if low > 0:
        target[:2] = e[:2] + d[:2] * max(0.0, 1 - low / 0.03)
    return target
