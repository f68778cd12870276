"""Scripted experts for LIBERO-Long: closed loop, privileged state, no memory, OSC_POSE actions in [-1, 1]."""

from __future__ import annotations

import numpy as np

from sim.expert_skills import OPEN, Place, downward, level, move, pick_place
from sim.view import View
from vla_wmrl.errors import UserError

RIM = 0.146  # m, height of the basket's rim over its origin


class Expert:
    """Scripted expert of one task. `act` depends on the view alone. Raises UserError for a task without a plan."""

    def __init__(self, suite: str, task_id: int):
        if suite != "libero_10" or not 0 <= task_id < 10:
            raise UserError(f"there is no scripted expert for {suite} task {task_id}: experts exist for libero_10 tasks 0 to 9")
        self.task_id = task_id

    def stage(self, view: View) -> str:
        """Name of the goal conjunct being worked on ("done" when all hold)."""
        for g, ok in zip(view.goal, view.satisfied):
            if not ok:
                return " ".join(g)
        return "done"

    def act(self, view: View) -> np.ndarray:
        """[7] float32 action in [-1, 1] for this state."""
        goals = [g for g, ok in zip(view.goal, view.satisfied) if not ok]
        if not goals:
            return move(view, view.eef_pos, OPEN, downward(view, level(view)))
        g = goals[0]
        return pick_place(view, g[1], self._basket(view, g))

    def _basket(self, view: View, goal: tuple[str, ...]) -> Place:
        basket = view.objects["basket_1"]
        names = [g[1] for g in view.goal]
        offset = (-0.025, 0.025)[names.index(goal[1])]
        top = basket.pos[2] + RIM
        return Place(np.array([basket.pos[0], basket.pos[1] + offset, top + 0.02]), tol=0.022, over=top, release=0.02)
