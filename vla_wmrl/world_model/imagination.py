"""Closed-loop rollouts of a policy in the world model, batched over starts of any task.

Noise keys are those of real execution (seed, start, look, member), so that an imagined rollout and its real twin differ
in the world only. Rows never mix: a rollout is the same whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vla_wmrl.policies.base import Policy
from vla_wmrl.policies.noise import generator
from vla_wmrl.types import Start
from vla_wmrl.world_model.base import OPEN_HAND, ImaginedRollout
from vla_wmrl.world_model.dynamics import Scene
from vla_wmrl.world_model.scene import concatenate, proprioception

STREAM = 43  # of the noise key: the dynamics' own noise
Until = Callable[[Start, float], bool]
WIDTH = 64  # rollouts side by side; the policy's batch shape, always the same


@torch.no_grad()
def imagine(model, policy: Policy, starts: Sequence[Start], members: Sequence[int], seed: Sequence[int], looks: int,
            stochastic: bool = True, noisy: bool = True, threshold: float = 0.5,
            explore_looks: int | None = None, until: Until | None = None) -> list[ImaginedRollout]:  # fmt: skip
    """One rollout per (start, member), `looks` looks long or until the goal seems to hold. Starts need a `state`.

    `stochastic`: the policy's noise; `noisy`: the dynamics'. `threshold`: of the success probability. `until`(start,
    progress) ends a rollout at a look, without success.
    """
    pairs = list(zip(starts, members, strict=True))
    found: list[ImaginedRollout] = []
    for first in range(0, len(pairs), WIDTH):
        block = pairs[first : first + WIDTH]
        filled = block + [block[-1]] * (WIDTH - len(block))
        found += _run(model, policy, filled, tuple(seed), looks, stochastic, noisy, threshold, explore_looks, until)[
            : len(block)
        ]
    return found


def _run(model, policy, pairs, seed, looks, stochastic, noisy, threshold, explore_looks, until) -> list[ImaginedRollout]:
    starts, members = [s for s, _ in pairs], [m for _, m in pairs]
    states = [np.asarray(s.state, dtype=np.float32) for s in starts]
    by_task = {t: np.array([i for i, s in enumerate(starts) if s.task_id == t]) for t in sorted({s.task_id for s in starts})}
    scene, context = _gather(model, states, by_task)
    languages = [model.tasks[s.task_id].language for s in starts]
    previous = torch.from_numpy(np.stack([OPEN_HAND if s.previous is None else s.previous for s in starts])).float()
    n, horizon = len(starts), policy.n_action_steps
    alive, stopped, p_success = np.ones(n, dtype=bool), np.zeros(n, dtype=bool), np.zeros(n)
    grades = model.net.grade(scene, context)
    progress = [[s.progress] for s in starts]
    value = torch.sigmoid(grades.value).numpy().copy()
    path = [[state] for state in states]
    inputs_of, chains, sde_steps, executed = ([[] for _ in range(n)] for _ in range(4))
    for look in range(looks):
        if not (alive & ~stopped).any():
            break
        features = _decode(model, states, by_task)
        inputs = policy.inputs_from_features(features, proprioception(scene.robot), languages)
        keys = [(*seed, *s.key, look, m) for s, m in pairs]
        sample = policy.sample(inputs, keys, stochastic and (explore_looks is None or look < explore_looks))
        ran = np.zeros((n, sample.actions.shape[1]), dtype=bool)
        draws = _draws([key[:-1] for key in keys], horizon, model.scenes.bodies) if noisy else None
        before = alive & ~stopped
        for step in range(horizon):
            moved, _ = model.net.step(
                scene, context, sample.actions[:, step], previous, None if draws is None else draws[:, step]
            )
            on = torch.from_numpy(alive & ~stopped)
            scene = Scene(*(torch.where(on.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(moved, scene, strict=True)))
            previous = sample.actions[:, step]
            ran[alive & ~stopped, step] = True
            grades = model.net.grade(scene, context)
            p = model.net.log_success(grades, context).exp().numpy()
            p_success = np.where(alive, np.maximum(p_success, p), p_success)
            alive = alive & ((p <= threshold) | stopped)
        states = _scatter(model, states, scene, by_task)
        now, late = torch.sigmoid(grades.progress).numpy(), torch.sigmoid(grades.value).numpy()
        for i in np.flatnonzero(before):
            inputs_of[i].append({k: v[i].cpu().numpy() for k, v in inputs.items()})
            chains[i].append(sample.chain[i].cpu().numpy())
            sde_steps[i].append(int(sample.sde_step[i]))
            executed[i].append(ran[i])
            path[i].append(states[i])
            progress[i].append(float(now[i]) if alive[i] else 1.0)
            value[i] = late[i] if alive[i] else 1.0
            stopped[i] = until is not None and until(starts[i], progress[i][-1])
    return [
        ImaginedRollout(
            start=starts[i],
            member=members[i],
            source="imagined",
            inputs={k: np.stack([look[k] for look in inputs_of[i]]) for k in inputs_of[i][0]},
            chain=np.stack(chains[i]),
            sde_step=np.array(sde_steps[i]),
            executed=np.stack(executed[i]),
            states=np.stack(path[i]),
            progress=np.array(progress[i], dtype=np.float32),
            success=not alive[i],
            terminated=not alive[i],
            truncated=bool(alive[i]),
            steps=int(np.stack(executed[i]).sum()),
            p_success=float(p_success[i]),
            value=float(value[i]),
        )
        for i in range(n)
    ]


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


def _decode(model, states: list[np.ndarray], by_task: dict[int, np.ndarray]) -> Tensor:
    parts = [model.decoder(task, np.stack([states[i] for i in rows])) for task, rows in by_task.items()]
    return torch.cat(parts)[torch.from_numpy(np.argsort(np.concatenate(list(by_task.values()))))]


def _draws(keys: Sequence[tuple[int, ...]], steps: int, bodies: int) -> Tensor:
    """[B, steps, 1 + M, 3] standard normal, by the rows' keys."""
    shape = (steps, 1 + bodies, 3)
    return torch.from_numpy(np.stack([generator(k, STREAM).standard_normal(shape, dtype=np.float32) for k in keys]))
