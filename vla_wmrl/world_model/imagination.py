"""Closed-loop rollouts of a policy in the world model, batched over starts of any task.

Noise keys are those of real execution (seed, start, look, member), so that an imagined rollout and its real twin differ
in the world only. Rows never mix: a rollout is the same whatever runs beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vla_wmrl.policies.base import Policy
from vla_wmrl.policies.noise import generator
from vla_wmrl.types import Start
from vla_wmrl.world_model.base import OPEN_HAND, ImaginedRollout
from vla_wmrl.world_model.dynamics import Scene
from vla_wmrl.world_model.scene import Context, concatenate, proprioception

STREAM = 43  # of the noise key: the dynamics' own noise
Until = Callable[[Start, float], bool]
WIDTH = 64  # rollouts side by side; the policy's batch shape, always the same


class _Slot:
    """One rollout under way, and what it has collected. `index` is its place in the answer; None: fills the batch up."""

    def __init__(self, index: int | None, start: Start, member: int):
        self.index, self.start, self.member = index, start, member
        self.open = index is not None
        self.success, self.p_success, self.value = False, 0.0, float("nan")
        self.progress, self.states = [start.progress], [np.asarray(start.state, dtype=np.float32)]
        self.inputs: list[dict] = []
        self.chains, self.sde_steps, self.executed = [], [], []
        self.previous = [np.asarray(OPEN_HAND if start.previous is None else start.previous, dtype=np.float32)]

    def rollout(self) -> ImaginedRollout:
        executed = np.stack(self.executed)
        return ImaginedRollout(
            start=self.start,
            member=self.member,
            source="imagined",
            inputs={k: np.stack([look[k] for look in self.inputs]) for k in self.inputs[0]},
            chain=np.stack(self.chains),
            sde_step=np.array(self.sde_steps),
            executed=executed,
            states=np.stack(self.states),
            progress=np.array(self.progress, dtype=np.float32),
            success=self.success,
            terminated=self.success,
            truncated=not self.success,
            steps=int(executed.sum()),
            p_success=float(self.p_success),
            value=float(self.value),
            previous=np.stack(self.previous),
        )


@torch.no_grad()
def imagine(model, policy: Policy, starts: Sequence[Start], members: Sequence[int], seed: Sequence[int], looks: int,
            stochastic: bool = True, noisy: bool = True, threshold: float = 0.5,
            explore_looks: int | None = None, until: Until | None = None,
            look_noise: bool = False) -> list[ImaginedRollout]:  # fmt: skip
    """One rollout per (start, member), `looks` looks long or until the goal seems to hold. Starts need a `state`.

    `stochastic`: the policy's noise; `noisy`: the dynamics'. `threshold`: of the success probability. `until`(start,
    progress) ends a rollout at a look, without success. A rollout that ends leaves its place in the batch to the next.
    `look_noise`: features with what the decoder leaves out of real ones, the same for all members of a group.
    """
    waiting = deque((i, s, m) for i, (s, m) in enumerate(zip(starts, members, strict=True)))
    found: list[ImaginedRollout | None] = [None] * len(waiting)
    if not waiting:
        return []
    filler = waiting[-1]
    slots = [_Slot(*waiting.popleft()) if waiting else _Slot(None, *filler[1:]) for _ in range(WIDTH)]
    scene, context, previous = _enter(model, slots)
    while any(slot.open for slot in slots):
        explores = [stochastic and (explore_looks is None or len(slot.inputs) < explore_looks) for slot in slots]
        scene, previous = _look(
            model, policy, slots, scene, context, previous, tuple(seed), explores, noisy, threshold, look_noise
        )
        entering = []
        for i, slot in enumerate(slots):
            if not slot.open:
                continue
            decided = until is not None and until(slot.start, slot.progress[-1])
            if slot.success or decided or len(slot.inputs) == looks:
                found[slot.index], slot.open = slot.rollout(), False
                if waiting:
                    slots[i] = _Slot(*waiting.popleft())
                    entering.append(i)
        if entering:
            at = torch.tensor(entering)
            new = _enter(model, [slots[i] for i in entering])
            scene = Scene(*(a.index_copy(0, at, b) for a, b in zip(scene, new[0], strict=True)))
            context, previous = context.replace(at, new[1]), previous.index_copy(0, at, new[2])
    return found


def _enter(model, slots: Sequence[_Slot]) -> tuple[Scene, Context, Tensor]:
    """Scene, Context and previous action [B, 7] of rollouts at their starts."""
    scene, context = _gather(model, [slot.states[0] for slot in slots], _by_task(slots))
    return scene, context, torch.from_numpy(np.stack([slot.previous[-1] for slot in slots]))


def _look(model, policy, slots, scene, context, previous, seed, explores, noisy, threshold, look_noise) -> tuple[Scene, Tensor]:
    """Every rollout looks once and runs the chunk that it decides on; those that are over stay where they are."""
    n, horizon, by_task = len(slots), policy.n_action_steps, _by_task(slots)
    states = [slot.states[-1] for slot in slots]
    looks = [((*seed, *slot.start.key), slot.start.look + len(slot.inputs)) for slot in slots] if look_noise else None
    features = _decode(model, states, by_task, looks)
    languages = [model.tasks[slot.start.task_id].language for slot in slots]
    inputs = policy.inputs_from_features(features, proprioception(scene.robot), languages)
    keys = [(*seed, *slot.start.key, len(slot.inputs), slot.member) for slot in slots]
    sample = policy.sample(inputs, keys, explores)
    draws = _draws([key[:-1] for key in keys], horizon, model.scenes.bodies) if noisy else None
    ran = np.zeros((n, sample.actions.shape[1]), dtype=bool)
    running, p_success = np.array([slot.open for slot in slots]), np.zeros(n)
    before = running.copy()
    for step in range(horizon):
        moved, _ = model.net.step(scene, context, sample.actions[:, step], previous, None if draws is None else draws[:, step])
        on = torch.from_numpy(running)
        scene = Scene(*(torch.where(on.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(moved, scene, strict=True)))
        previous = sample.actions[:, step]
        ran[running, step] = True
        grades = model.net.grade(scene, context)
        p = model.net.log_success(grades, context).exp().numpy()
        p_success = np.where(running, np.maximum(p_success, p), p_success)
        running = running & (p <= threshold)
    states = _scatter(model, states, scene, by_task)
    progress, value = torch.sigmoid(grades.progress).numpy(), torch.sigmoid(grades.value).numpy()
    for i in np.flatnonzero(before):
        slot = slots[i]
        slot.success, slot.p_success = not running[i], max(slot.p_success, p_success[i])
        slot.inputs.append({k: v[i].cpu().numpy() for k, v in inputs.items()})
        slot.chains.append(sample.chain[i].cpu().numpy())
        slot.sde_steps.append(int(sample.sde_step[i]))
        slot.executed.append(ran[i])
        slot.previous.append(previous[i].numpy())
        slot.states.append(states[i])
        slot.progress.append(1.0 if slot.success else float(progress[i]))
        slot.value = 1.0 if slot.success else value[i]
    return scene, previous


def _by_task(slots: Sequence[_Slot]) -> dict[int, np.ndarray]:
    """Which rows are of which task."""
    tasks = np.array([slot.start.task_id for slot in slots])
    return {int(task): np.flatnonzero(tasks == task) for task in np.unique(tasks)}


def _gather(model, states: list[np.ndarray], by_task: dict[int, np.ndarray]):
    """Scene and Context of all rows, in their order."""
    parts = [model.scene(task, np.stack([states[i] for i in rows])) for task, rows in by_task.items()]
    back = torch.from_numpy(np.argsort(np.concatenate(list(by_task.values()))))
    scene = Scene(*(torch.cat([p[0][k] for p in parts])[back] for k in range(2)))
    return scene, concatenate([p[1] for p in parts]).rows(back)


def _scatter(model, states: list[np.ndarray], scene: Scene, by_task: dict[int, np.ndarray]) -> list[np.ndarray]:
    """The state vectors of `scene`; what the dynamics do not step stays as it was."""
    out = list(states)
    for task, rows in by_task.items():
        templates = np.stack([states[i] for i in rows])
        for i, state in zip(rows, model.scenes.write(task, templates, scene.robot[rows], scene.bodies[rows]), strict=True):
            out[i] = state
    return out


def _decode(model, states: list[np.ndarray], by_task: dict[int, np.ndarray], looks: list | None) -> Tensor:
    parts = [
        model.decoder(task, np.stack([states[i] for i in rows]), None if looks is None else [looks[i] for i in rows])
        for task, rows in by_task.items()
    ]
    return torch.cat(parts)[torch.from_numpy(np.argsort(np.concatenate(list(by_task.values()))))]


def _draws(keys: Sequence[tuple[int, ...]], steps: int, bodies: int) -> Tensor:
    """[B, steps, 1 + M, 3] standard normal, by the rows' keys."""
    shape = (steps, 1 + bodies, 3)
    return torch.from_numpy(np.stack([generator(k, STREAM).standard_normal(shape, dtype=np.float32) for k in keys]))
