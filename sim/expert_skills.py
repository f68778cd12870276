"""Memoryless skills of the scripted expert: where to grasp, how to travel, what to do next from this state alone.

Every function maps a `View` to something and keeps nothing: what a stateful script would remember ("holding",
"released", "closing") is read from finger width, finger speed and the object's place between the fingers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from sim.view import Pose, View

OPEN, CLOSE = -1.0, 1.0
POSITION_GAIN = 14.0  # action per metre; 20 would ask for the whole error in one step (0.05 m is full scale)
ROTATION_GAIN = 1.2  # action per radian; 2 would ask for the whole error in one step
FULLY_OPEN = 0.072  # m, finger width above which nothing can be held (0.078 at rest)
MOVING = 0.012  # m/s, finger speed above which the gripper is still opening or closing
TIP = 0.012  # m, how far the finger tips reach below the grip site
UP = np.array([0.0, 0.0, 1.0])
FINGER = 0.0505  # m, distance of an open finger's middle from the grip site, along the finger axis
LEAN = 0.7  # tangent of the hand's lean where it must reach into or under something
HANDLE = (0.055, 0.070)  # m, where a mug's handle is taken: out from the origin, and up
HAND = (0.105, 0.035, 0.035)  # m, half length along the finger axis, half thickness, height over the grip site


@dataclass(frozen=True)
class Shape:
    """Bounds of an object's collision geometry in its own frame, metres, and how it is grasped."""

    lo: tuple[float, float, float]
    hi: tuple[float, float, float]
    grasp: str = "box"  # "box" (across the narrow side), "rim" (one finger inside), "knob" (a point), "none"
    centre_xy: tuple[float, float] = (0.0, 0.0)  # of the rim's circle or of the knob
    radius: float = 0.0  # m, of the rim's middle
    top: float = 0.0  # m, height of the rim or knob
    thick: float = 0.0  # m, what the fingers measure on it
    handle: float | None = None  # angle of a mug's handle in its own xy plane, rad: no finger goes there

    @property
    def centre(self) -> np.ndarray:
        return (np.array(self.lo) + self.hi) / 2

    @property
    def half(self) -> np.ndarray:
        return (np.array(self.hi) - self.lo) / 2


# Measured from the collision geoms of LIBERO's assets (bodies of these categories do not differ between tasks).
SHAPES = {
    "alphabet_soup": Shape((-0.031, -0.039, -0.035), (0.031, 0.038, 0.028)),
    "tomato_sauce": Shape((-0.031, -0.039, -0.034), (0.031, 0.038, 0.028)),
    "cream_cheese": Shape((-0.041, -0.021, -0.009), (0.041, 0.021, 0.009)),
    "butter": Shape((-0.038, -0.020, -0.009), (0.038, 0.020, 0.009)),
    "chocolate_pudding": Shape((-0.041, -0.023, -0.013), (0.040, 0.023, 0.014)),
    "ketchup": Shape((-0.028, -0.072, -0.018), (0.029, 0.073, 0.019)),
    "orange_juice": Shape((-0.027, -0.070, -0.026), (0.026, 0.061, 0.026)),
    "milk": Shape((-0.026, -0.070, -0.026), (0.027, 0.061, 0.026)),
    "porcelain_mug": Shape(
        (-0.065, -0.049, 0.002), (0.060, 0.047, 0.108), "rim", (0.0125, -0.001), 0.0455, 0.108, 0.005, np.pi
    ),
    "white_yellow_mug": Shape((-0.071, -0.053, 0.0), (0.068, 0.053, 0.103), "rim", (-0.0185, 0.0), 0.0505, 0.103, 0.005, 0.0),
    "red_coffee_mug": Shape((-0.061, -0.047, -0.002), (0.062, 0.046, 0.131)),
    "akita_black_bowl": Shape((-0.054, -0.054, 0.002), (0.053, 0.053, 0.052), "rim", (0.0, 0.0), 0.051, 0.052, 0.005),
    "moka_pot": Shape((-0.041, -0.056, -0.066), (0.041, 0.091, 0.086), "knob", (0.0, -0.001), 0.0, 0.086, 0.011),
    "black_book": Shape((-0.015, -0.067, 0.002), (0.014, 0.043, 0.137)),
    "plate": Shape((-0.068, -0.068, -0.003), (0.070, 0.069, 0.016), "none"),
    "flat_stove": Shape((-0.052, -0.095, -0.005), (0.245, 0.095, 0.050), "none"),
    "white_cabinet": Shape((-0.123, -0.079, 0.005), (0.131, 0.112, 0.223), "none"),  # without its drawers
    "wine_rack": Shape((-0.134, -0.124, -0.002), (0.134, 0.129, 0.328), "none"),
    "microwave": Shape((-0.173, -0.088, 0.0), (0.173, 0.111, 0.189), "none"),  # without its door
    "desk_caddy": Shape((-0.075, -0.217, 0.001), (0.075, 0.217, 0.168), "none"),
    "chefmate_8_frypan": Shape((-0.097, -0.103, 0.001), (0.259, 0.101, 0.059), "none"),
    "wine_bottle": Shape((-0.021, -0.022, 0.001), (0.022, 0.022, 0.158)),
    "basket": Shape((-0.084, -0.079, 0.004), (0.085, 0.079, 0.146), "none"),
}


def category(name: str) -> str:
    """`alphabet_soup_1` -> `alphabet_soup`."""
    return name.rsplit("_", 1)[0]


def _clip(v: np.ndarray) -> np.ndarray:
    return np.clip(v, -1.0, 1.0)


def rotation_vector(current: np.ndarray, target: np.ndarray) -> np.ndarray:
    """[3] axis-angle in the world frame that turns frame `current` [3, 3] into `target` [3, 3], rad."""
    r = target @ current.T
    angle = np.arccos(np.clip((np.trace(r) - 1) / 2, -1, 1))
    axis = np.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]])
    n = np.linalg.norm(axis)
    if n < 1e-9:
        return np.zeros(3)  # aligned (or exactly opposite, which no plan asks for)
    return axis / n * angle


def downward(view: View, finger_axis: np.ndarray, lean: np.ndarray | None = None) -> np.ndarray:
    """[3, 3] frame of a hand that points down, fingers along +-`finger_axis` (the sign nearer to now and to rest).

    `lean` [3]: horizontal, orthogonal to the axis; its length is the tangent by which the fingers point that way.
    """
    f = np.array([finger_axis[0], finger_axis[1], 0.0])
    f /= np.linalg.norm(f)
    if f @ view.eef_mat[:, 0] + 0.5 * f[1] < 0:  # at rest the fingers are along +y; half a turn from it is out of reach
        f = -f
    z = np.array([0.0, 0.0, -1.0]) if lean is None else np.array([lean[0], lean[1], -1.0])
    z /= np.linalg.norm(z)
    return np.stack([f, np.cross(z, f), z], 1)


def level(view: View) -> np.ndarray:
    """[3] the horizontal finger axis of now."""
    f = view.eef_mat[:, 0] * [1, 1, 0]
    return f / max(np.linalg.norm(f), 1e-6)


def move(view: View, pos: np.ndarray, grip: float, mat: np.ndarray, gain: float = POSITION_GAIN) -> np.ndarray:
    """[7] float32 action towards grip-site position `pos` [3] and orientation `mat` [3, 3]."""
    a = np.empty(7)
    a[:3] = _clip((pos - view.eef_pos) * gain)
    a[3:6] = _clip(rotation_vector(view.eef_mat, mat) * ROTATION_GAIN)
    a[6] = grip
    return a.astype(np.float32)


# ---- geometry of the scene


@cache
def _corners(shape: Shape) -> np.ndarray:
    lo, hi = np.array(shape.lo), np.array(shape.hi)
    return np.array([[(lo, hi)[i][0], (lo, hi)[j][1], (lo, hi)[k][2]] for i in (0, 1) for j in (0, 1) for k in (0, 1)])


def bounds(pose: Pose, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """World-axis bounds (lo [3], hi [3]) of an object, metres."""
    c = pose.pos + _corners(shape) @ pose.mat.T
    return c.min(0), c.max(0)


def _segment_hits(a: np.ndarray, b: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> bool:
    """Whether the plane segment a-b meets the rectangle [lo, hi] (all [2])."""
    t0, t1 = 0.0, 1.0
    d = b - a
    for i in range(2):
        if abs(d[i]) < 1e-9:
            if not lo[i] <= a[i] <= hi[i]:
                return False
            continue
        u, v = (lo[i] - a[i]) / d[i], (hi[i] - a[i]) / d[i]
        t0, t1 = max(t0, min(u, v)), min(t1, max(u, v))
    return t0 <= t1


def clearance(view: View, to: np.ndarray, skip: tuple[str, ...], radius: float = 0.05) -> float:
    """Height (m) of the highest thing that the hand would cross on its way to `to` [3]; -inf over a free table."""
    top = -np.inf
    for name, pose in view.objects.items():
        shape = SHAPES.get(category(name))
        if shape is None or name in skip:
            continue
        lo, hi = bounds(pose, shape)
        if hi[2] > top and _segment_hits(view.eef_pos[:2], to[:2], lo[:2] - radius, hi[:2] + radius):
            top = hi[2]
    return top


# ---- grasps


@dataclass(frozen=True)
class Grasp:
    """A pose for the open hand, and what the fingers measure when the object is between them."""

    pos: np.ndarray  # [3] grip site
    axis: np.ndarray  # [3] horizontal, finger axis
    least: float  # m, finger width below which the object is not between the fingers
    lean: np.ndarray | None = None  # [3] see `downward`


def _neighbours(view: View, name: str, floor: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """World-axis bounds of everything else that reaches above `floor` (m) within 0.4 m of `name`."""
    here, found = view.objects[name].pos, []
    for other, pose in view.objects.items():
        shape = SHAPES.get(category(other))
        if shape is not None and other != name and np.abs(pose.pos - here)[:2].max() < 0.4:
            lo, hi = bounds(pose, shape)
            if hi[2] > floor:
                found.append((lo, hi))
    return found


def _crowding(around: list[tuple[np.ndarray, np.ndarray]], pos: np.ndarray, axis: np.ndarray) -> float:
    """How far (m, summed) the open fingers and the hand of a grasp would be inside their neighbours' margins."""
    total = 0.0
    for lo, hi in around:
        for s in (-1, 1):
            total += _inside(pos[:2] + s * FINGER * axis[:2], lo, hi, 0.024)
            if hi[2] > pos[2] + HAND[2]:
                total += _inside(pos[:2] + s * (HAND[0] - HAND[1]) * axis[:2], lo, hi, HAND[1] + 0.012)
    return total


def _inside(p: np.ndarray, lo: np.ndarray, hi: np.ndarray, margin: float) -> float:
    """How far (m) point `p` [2] is inside the margin around the rectangle [lo, hi]."""
    return max(0.0, margin - float(np.linalg.norm(np.maximum(np.maximum(lo[:2] - p, p - hi[:2]), 0))))


def box_grasp(view: View, name: str, depth: float = 0.02) -> Grasp:
    """Across the narrowest horizontal side, shifted along the long one where a neighbour is in the fingers' way."""
    pose, shape = view.objects[name], SHAPES[category(name)]
    centre, half = pose.pos + pose.mat @ shape.centre, shape.half
    lo, hi = bounds(pose, shape)
    z = max(centre[2], hi[2] - depth - 0.02)  # tall things high up, flat things as deep as the tips allow
    z = max(z, lo[2] + TIP + 0.002)
    upright = int(np.argmax(np.abs(pose.mat[2])))
    narrow, long = sorted((i for i in range(3) if i != upright), key=lambda i: half[i])
    if half[long] - half[narrow] < 0.004:  # round or square: any yaw does for a can, so keep the present one
        return Grasp(np.array([centre[0], centre[1], z]), level(view), 2 * half[narrow] - 0.015)
    f = pose.mat[:, narrow] * [1, 1, 0]
    f /= np.linalg.norm(f)
    u = pose.mat[:, long] * [1, 1, 0]
    u /= np.linalg.norm(u)
    room = np.array([max(half[long] - 0.016, 0.0), np.clip(0.030 - half[narrow], 0.0, 0.012)])
    around = _neighbours(view, name, z - TIP)
    best, cost = None, np.inf
    for i in (0.0, 0.5, -0.5, 1.0, -1.0):
        for j in (0.0, 1.0, -1.0):  # off the middle of the fingers: the first to touch pushes the object there
            p = np.array([centre[0], centre[1], z]) + i * room[0] * u + j * room[1] * f
            c = _crowding(around, p, f) + 0.002 * (abs(i) + abs(j))
            if c < cost:
                best, cost = p, c
    return Grasp(best, f, 2 * half[narrow] - 0.015)


def rim_grasp(view: View, name: str, prefer: np.ndarray | None = None, depth: float = 0.016) -> Grasp:
    """One finger inside a mug or bowl, one outside: where neighbours and handle leave room and the wrist turns least.

    `prefer` [2]: world direction from the centre in which to grasp if possible.
    """
    pose, shape = view.objects[name], SHAPES[category(name)]
    around = _neighbours(view, name, pose.pos[2] + shape.top - depth - TIP)
    best, cost = None, np.inf
    for angle in np.arange(16) * (np.pi / 8):
        if shape.handle is not None and np.cos(angle - shape.handle) > 0.75:
            continue
        local = np.array([np.cos(angle), np.sin(angle), 0.0])
        out = pose.mat @ local
        p = pose.pos + pose.mat @ (shape.radius * local + [*shape.centre_xy, shape.top]) - [0, 0, depth]
        c = _crowding(around, p, out) + 0.004 * (1 - abs(out[1])) + 0.0004 * out[0] + 0.05 * abs(out[2])
        if prefer is not None:
            c += 0.02 * (1 - float(out[:2] @ prefer))
        if c < cost:
            best, cost = Grasp(p, out, 0.5 * shape.thick), c
    return best


def knob_grasp(view: View, name: str) -> Grasp:
    """A small thing on top, by the finger tips, with the present yaw."""
    pose, shape = view.objects[name], SHAPES[category(name)]
    return Grasp(pose.pos + pose.mat @ np.array([*shape.centre_xy, shape.top - 0.008]), level(view), 0.5 * shape.thick)


def handle_grasp(view: View, name: str) -> Grasp:
    """A mug by its handle, the hand leaning back over it: the mug goes ahead of the hand into narrow places."""
    pose, shape = view.objects[name], SHAPES[category(name)]
    out = np.array([np.cos(shape.handle), np.sin(shape.handle), 0.0])
    pos = pose.pos + pose.mat @ (HANDLE[0] * out + [0, 0, HANDLE[1]])
    return Grasp(pos, pose.mat @ np.cross(out, [0, 0, 1.0]), 0.008, -LEAN * (pose.mat @ out))


def grasp_of(view: View, name: str, kind: str | None = None, prefer: np.ndarray | None = None) -> Grasp:
    """The grasp for an object as it lies now; `kind` overrides its shape's usual one."""
    kind = kind or SHAPES[category(name)].grasp
    if kind == "handle":
        return handle_grasp(view, name)
    if kind == "rim":
        return rim_grasp(view, name, prefer)
    return knob_grasp(view, name) if kind == "knob" else box_grasp(view, name)


def between_fingers(view: View, name: str, kind: str | None = None, margin: float = 0.014) -> bool:
    """Whether the grip site is inside the object (on its rim, at its knob or handle), whatever the fingers do."""
    pose, shape = view.objects[name], SHAPES[category(name)]
    local = pose.mat.T @ (view.eef_pos - pose.pos)
    kind = kind or shape.grasp
    if kind == "handle":
        out = np.array([np.cos(shape.handle), np.sin(shape.handle), 0.0])
        return bool(np.all(np.abs(local - HANDLE[0] * out - [0, 0, HANDLE[1]]) < [0.025, 0.025, 0.03]))
    if kind == "box":
        return bool(np.all(np.abs(local - shape.centre) < shape.half + margin))
    r = np.linalg.norm(local[:2] - shape.centre_xy)
    return bool(abs(r - shape.radius) < margin and -0.045 < local[2] - shape.top < margin)


# ---- pick and place


@dataclass(frozen=True)
class Place:
    """Where an object's body origin must go, and when to let go."""

    pos: np.ndarray  # [3] target of the object's origin at release
    tol: float = 0.02  # m, horizontal
    over: float = 0.0  # m, height (world) that the object's lowest point must clear on the way, 0 for just lifted
    release: float = 0.01  # m, let go once the origin is less than this above pos
    finger_axis: np.ndarray | None = None  # [3] finger axis while carrying; None keeps the grasp's


def approach(view: View, name: str, grasp: Grasp, funnel: float = 0.1) -> np.ndarray:
    """Open hand to `grasp` from above, over whatever stands in between."""
    e, mat = view.eef_pos, downward(view, grasp.axis, grasp.lean)
    d = grasp.pos - e
    hd = float(np.linalg.norm(d[:2]))
    turn = float(np.linalg.norm(rotation_vector(view.eef_mat, mat)))
    if hd < 0.012 and -0.008 < d[2] < 0.014 and turn < 0.2:
        return move(view, grasp.pos, CLOSE, mat)
    off = min(1.0, max(0.0, hd - 0.008) / 0.03 + max(0.0, turn - 0.15) / 0.3)
    target = grasp.pos + np.array([0, 0, funnel * off])
    if hd > 0.03:
        target[2] = max(target[2], clearance(view, grasp.pos, (name,)) + 0.05)
    low = target[2] - 0.05 - e[2]  # travel sideways only near travel height
    if low > 0 and hd > 0.03:
        target[:2] = e[:2] + d[:2] * max(0.0, 1 - low / 0.03)
    return move(view, target, OPEN, mat)


def carry(view: View, name: str, place: Place) -> np.ndarray:
    """Held object to `place`: up, across, down, and open there."""
    e, pose = view.eef_pos, view.objects[name]
    axis = place.finger_axis if place.finger_axis is not None else level(view)
    mat = downward(view, axis)
    d = place.pos - pose.pos
    hd = float(np.linalg.norm(d[:2]))
    if hd < place.tol:
        if d[2] > -place.release:
            return move(view, e, OPEN, mat)
        return move(view, e + d, CLOSE, mat)
    bottom = bounds(pose, SHAPES[category(name)])[0][2]
    over = max(place.over, place.pos[2] + bottom - pose.pos[2], clearance(view, place.pos, (name,), radius=0.06))
    target = e + d
    lift = over + 0.04 - bottom
    if lift > 0.02:
        target[2] = e[2] + lift
        if hd > place.tol + 0.02:
            target[:2] = e[:2] + d[:2] * max(0.0, 1 - (lift - 0.02) / 0.03) * (hd > 0.05)
    else:
        target[2] = e[2] + lift
    return move(view, target, CLOSE, mat)


def grip(view: View, name: str, grasp: Grasp, kind: str | None = None) -> tuple[bool, np.ndarray | None]:
    """(held, action): whether `name` is firmly held; if not, the action that gets there, or that finishes closing."""
    if not (between_fingers(view, name, kind) and view.gripper_width < FULLY_OPEN):
        return False, approach(view, name, grasp)
    mat = downward(view, level(view), grasp.lean)
    if view.gripper_width < grasp.least:  # closed beside it
        return False, move(view, view.eef_pos + 0.1 * UP, OPEN, mat)
    if float(np.abs(view.gripper_qvel).max()) > MOVING:
        return False, move(view, view.eef_pos, CLOSE, mat)
    return True, None


def pick_place(view: View, name: str, place: Place, prefer: np.ndarray | None = None) -> np.ndarray:
    """One control step of bringing `name` to `place`, from any state."""
    grasp = grasp_of(view, name, prefer=prefer)
    d = place.pos - view.objects[name].pos
    there = np.linalg.norm(d[:2]) < place.tol and d[2] > -place.release
    if there and between_fingers(view, name) and view.gripper_width < FULLY_OPEN:
        return move(view, view.eef_pos, OPEN, downward(view, level(view)))
    held, action = grip(view, name, grasp)
    return carry(view, name, place) if held else action
