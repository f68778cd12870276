"""Scripted experts for LIBERO-Long: closed loop, privileged state, no memory, OSC_POSE actions in [-1, 1]."""

from __future__ import annotations

import numpy as np

from sim.expert_fixtures import close_door, close_drawer, into_microwave, turn_knob
from sim.expert_skills import (
    FULLY_OPEN,
    OPEN,
    SHAPES,
    Place,
    between_fingers,
    category,
    downward,
    level,
    move,
    pick_place,
)
from sim.view import View
from vla_wmrl.errors import UserError

RIM = 0.146  # m, height of the basket's rim over its origin


class Expert:
    """Scripted expert of one task. `act` depends on the view alone. Raises UserError for a task without a plan."""

    def __init__(self, suite: str, task_id: int):
        if suite != "libero_10" or not 0 <= task_id < 10:
            raise UserError(f"no scripted expert for {suite} task {task_id}: there are some for libero_10 0 to 9")
        self.task_id = task_id

    def stage(self, view: View) -> str:
        """Name of the goal conjunct being worked on ("done" when all hold)."""
        for g, ok in zip(view.goal, view.satisfied, strict=True):
            if not ok:
                return " ".join(g)
        return "done"

    def act(self, view: View) -> np.ndarray:
        """[7] float32 action in [-1, 1] for this state."""
        for g, ok in zip(view.goal, view.satisfied, strict=True):
            # An object that a goal already counts may still be in the hand.
            closed = view.gripper_width < FULLY_OPEN
            if ok and closed and g[0] in ("in", "on") and between_fingers(view, g[1], self._kind(g)):
                return self._work(view, g)
        unmet = [g for g, ok in zip(view.goal, view.satisfied, strict=True) if not ok]
        for g in sorted(unmet, key=lambda g: g[0] == "close"):  # doors and drawers last
            return self._work(view, g)
        return move(view, view.eef_pos, OPEN, downward(view, level(view)))

    def _kind(self, goal: tuple[str, ...]) -> str | None:
        return "handle" if goal[-1].startswith("microwave") else None

    def _work(self, view: View, goal: tuple[str, ...]) -> np.ndarray:
        target = goal[-1]
        if goal[0] == "turnon":
            return turn_knob(view, target)
        if goal[0] == "close" and target.startswith("white_cabinet"):
            bowl = view.objects["akita_black_bowl_1"]
            if ("in", "akita_black_bowl_1", target) in view.goal and bowl.mat[2, 2] < 0.95:  # leans: would jam
                return self._work(view, ("in", "akita_black_bowl_1", target))
            return close_drawer(view, "white_cabinet_1", "white_cabinet_1_bottom_level")
        if goal[0] == "close":
            return close_door(view, target, f"{target}_microjoint")
        if target.startswith("microwave"):
            return into_microwave(view, goal[1], "microwave_1")
        if target == "white_cabinet_1_bottom_region":
            region = view.regions[target]
            place = Place(region.pos + np.array([0.026, -0.017, 0.015]), tol=0.02,
                          over=region.pos[2] + 0.035, release=0.02, finger_axis=np.array([1.0, 0.0, 0.0]))  # fmt: skip
            return pick_place(view, goal[1], place, prefer=np.array([-1.0, 0.0]))
        if target == "basket_1_contain_region":
            place = self._basket(view, goal)
        elif target == "desk_caddy_1_back_contain_region":
            place = self._caddy(view, goal[1])
        elif target.startswith("plate"):
            place = self._plate(view, goal)
        elif target.endswith("table_plate_right_region"):
            region = view.regions[target]
            place = Place(region.pos + np.array([0.0, 0.012, 0.042]), tol=0.012, release=0.012)
        else:
            place = self._stove(view, goal)
        return pick_place(view, goal[1], place)

    def _basket(self, view: View, goal: tuple[str, ...]) -> Place:
        basket = view.objects["basket_1"]
        names = [g[1] for g in view.goal]
        offset = (-0.025, 0.025)[names.index(goal[1])]
        top = basket.pos[2] + RIM
        return Place(np.array([basket.pos[0], basket.pos[1] + offset, top + 0.02]), tol=0.022, over=top, release=0.02)

    def _plate(self, view: View, goal: tuple[str, ...]) -> Place:
        plate, mug = view.objects[goal[2]], view.objects[goal[1]]
        cup = mug.mat @ np.array([*SHAPES[category(goal[1])].centre_xy, 0.0])
        xy = plate.pos[:2] - 0.5 * cup[:2]  # the goal wants the origin there, balance the cup
        return Place(np.array([*xy, plate.pos[2] + 0.006]), tol=0.012, release=0.012)

    def _caddy(self, view: View, name: str) -> Place:
        region, book = view.regions["desk_caddy_1_back_contain_region"], view.objects[name]
        centre = book.mat @ SHAPES["black_book"].centre
        top = region.pos[2] + 0.085
        return Place(
            np.array([*(region.pos - centre)[:2], region.pos[2] - 0.01]),
            tol=0.01,
            over=top,
            release=0.01,
            finger_axis=np.array([1.0, 0.0, 0.0]),
        )

    def _stove(self, view: View, goal: tuple[str, ...]) -> Place:
        region = view.regions[goal[2]]
        names = [g[1] for g in view.goal if g[0] == "on"]
        offset = (0.0,) if len(names) == 1 else (-0.048, 0.048)
        x = region.pos[0] + offset[names.index(goal[1])]
        return Place(np.array([x, region.pos[1], region.pos[2] + 0.086]), tol=0.012, release=0.012)
