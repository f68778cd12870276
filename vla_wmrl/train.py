"""The training loop, in the order of the method: choose anchors, roll out, imagine, calibrate, fuse, update, observe.

Sources: WMRL (2608.12564) 3.3 with Eq. 5; GRPO (2402.03300). The loop gets objects and knows neither simulators nor
benchmarks: `Executor` runs groups for real, `WorldModel` imagines them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from vla_wmrl import anchors
from vla_wmrl.advantage import group_advantages
from vla_wmrl.config import TrainConfig
from vla_wmrl.debias import IsotonicDebiaser
from vla_wmrl.fusion import Fusion
from vla_wmrl.late import Begun, LateAnchors
from vla_wmrl.learner import Learner, all_cores
from vla_wmrl.stats import spearman
from vla_wmrl.tracking import Ledger
from vla_wmrl.types import Group, Outcome, Rollout, Start


class Executor(Protocol):
    """Starts real execution of groups, and returns at once. `seed` and a rollout's start key its noise."""

    def __call__(self, starts: Sequence[Start], group_size: int, seed: tuple[int, ...]) -> Future: ...


class Imagination(Protocol):
    """The same in a world model, with the same policy and the same noise keys."""

    def __call__(
        self, starts: Sequence[Start], group_size: int, seed: tuple[int, ...]
    ) -> list[tuple[Rollout, ...]] | Future[list[tuple[Rollout, ...]]]:
        """At once and while the anchors run, or a future where the anchors' own workers imagine after them."""
        ...


class Credit(Protocol):
    """Advantages within rollouts, on top of each rollout's own: the step level of policies that act in turns."""

    def __call__(self, rollouts: Sequence[Any], rewards: np.ndarray) -> list[np.ndarray]:
        """Of one group with rewards [G] (NaN: absent): G arrays, one value a turn."""
        ...


class Starts(Protocol):
    """Where groups begin. `draw` depends on (seed, step) and on what the bank held."""

    def draw(self, step: int, n: int) -> list[Start]: ...


@dataclass
class Loop:
    """The objects of a run. `imagine` is None in the arms without a world model, `debias` in those without calibration.

    `score` of an imagined rollout is what the calibration maps to real rewards; None: the reward itself. `pairs`: a real
    rollout of every anchor of the last update, with its imagined twin, to look at.
    `credit` adds advantages within rollouts, for policies whose `collate` takes them; None: one advantage a rollout.
    `dreams`: where imagined groups begin, if not where anchors do. `lag`: updates later that anchors train (`late`); an
    executor then samples with the policy it was called with. `executed`: the anchors' rollouts of the last update.
    `grade`: the world model's rewards [G] of an executed group. With it anchors have no twins of their own: a pair is one
    rollout judged twice (WMRL 3.3). Only for world models that judge what was done without knowing what came of it.
    Of a rollout the loop itself reads what `types.Outcome` says, whatever kind the policy trains on.
    """

    cfg: TrainConfig
    learner: Learner
    starts: Starts
    execute: Executor
    imagine: Imagination | None
    reward: Callable[[Rollout], float]
    debias: IsotonicDebiaser | None
    fusion: Fusion
    ledger: Ledger
    score: Callable[[Rollout], float] | None = None
    credit: Credit | None = None
    dreams: Starts | None = None
    lag: int = 0
    grade: Callable[[Sequence[Rollout]], np.ndarray] | None = None
    pairs: list[tuple[Rollout, Rollout]] = field(default_factory=list)
    executed: list[Rollout] = field(default_factory=list)

    def __post_init__(self):
        self.late = LateAnchors(self.lag)
        if self.score is not None and self.debias is None:
            raise ValueError("a score that is no reward needs a calibration")
        if self.score is not None and not self.cfg.debias.wait:
            raise ValueError("a score that is no reward has to wait for its calibration")

    def _begin(self, step: int) -> Begun:
        """Draws the groups of an update, starts its anchors and imagines meanwhile."""
        cfg, ledger = self.cfg, self.ledger
        n, size = cfg.grpo.n_groups, cfg.grpo.group_size
        anchor = anchors.choose(cfg.seed, step, n, cfg.anchors.fraction, cfg.anchors.minimum)
        starts = self.starts.draw(step, n)
        seed = (cfg.seed, step)
        if self.dreams is not None:
            with ledger.phase("dream"):
                dreamt = self.dreams.draw(step, n)
            starts = [s if a else d for s, d, a in zip(starts, dreamt, anchor, strict=True)]

        executing = self.execute([s for s, a in zip(starts, anchor, strict=True) if a], size, seed)
        with ledger.phase("imagine"):  # while the anchors run
            imagined = self._imagined(starts, anchor, seed)
        if isinstance(imagined, Future):  # their workers imagine after the anchors
            with ledger.phase("execute"):
                executing.result()
            with ledger.phase("imagine"):
                imagined = imagined.result()
        return Begun(step, starts, anchor, executing, imagined, self.learner.weights() if self.lag else [])

    def _imagined(self, starts: Sequence[Start], anchor: np.ndarray, seed: tuple[int, ...]):
        """Imagined groups [n], with the anchors' twins unless executed groups are graded; () where there is none."""
        size = self.cfg.grpo.group_size
        if self.imagine is None:
            return [()] * len(starts)
        if self.grade is None:
            return self.imagine(starts, size, seed)
        others = iter(self.imagine([s for s, a in zip(starts, anchor, strict=True) if not a], size, seed))
        return [() if a else next(others) for a in anchor]

    def step(self, step: int) -> dict[str, float]:
        """One policy update; returns its metrics."""
        begun = self._begin(step)
        self.ledger.add_imagined("rollouts", sum(r.steps for group in begun.imagined for r in group))
        due = self.late.exchange(begun)
        if due is begun:
            groups, earlier = self._groups(begun), None
        else:
            groups, earlier = self._groups(begun, anchors=False), None if due is None else due.weights
            groups += [] if due is None else self._groups(due, anchors=True)
        self.executed = [r for g in groups if g.anchor for r in g.rollouts]
        self.ledger.add_real("anchors", sum(r.steps for r in self.executed))
        anchor, size = np.array([g.anchor for g in groups]), self.cfg.grpo.group_size

        self.pairs = [(g.rollouts[0], g.twins[0]) for g in groups if g.twins]
        r_env = np.stack([g.r_env for g in groups])
        r_wm = np.stack([g.r_wm for g in groups])
        tasks = np.array([g.start.task_id for g in groups])
        f = r_wm if self.debias is None else self.debias.transform(r_wm, tasks[:, None])
        ready = self.score is None or self.debias.ready
        metrics = self._update(groups, r_env, f, earlier)

        # After the update, so that a pair never calibrates itself (design: out of fold).
        if self.imagine is not None and anchor.any():
            if self.debias is None or self.debias.ready:  # raw scores have another scale, and would linger in the residual
                self.fusion.observe(f[anchor], r_env[anchor])
            if self.debias is not None:
                ids = np.repeat([g.group_id for g in groups if g.anchor], size)
                pairs = np.column_stack([r_wm[anchor].ravel(), r_env[anchor].ravel()])
                self.debias.observe(pairs, ids, np.repeat(tasks[anchor], size))
        return metrics | self._describe(groups, r_env, r_wm, f, anchor, ready)

    def _groups(self, begun: Begun, anchors: bool | None = None) -> list[Group]:
        """The groups of an update, or of these its anchors alone, or the others alone."""
        real: Sequence[tuple] = ()
        if anchors is not False:
            with self.ledger.phase("execute"):
                real = begun.executing.result()
        size, queue = self.cfg.grpo.group_size, iter(real)
        absent = np.full(size, np.nan)
        groups = []
        for i, (start, is_anchor, twin) in enumerate(zip(begun.starts, begun.anchor, begun.imagined, strict=True)):
            if anchors not in (None, is_anchor):
                continue
            executed = next(queue) if is_anchor else ()
            r_wm = np.array([(self.score or self.reward)(r) for r in twin]) if twin else absent
            if executed and self.grade is not None:
                twin, r_wm = executed, self.grade(executed)
            groups.append(
                Group(
                    group_id=begun.step * self.cfg.grpo.n_groups + i,
                    start=start,
                    anchor=bool(is_anchor),
                    rollouts=executed or twin,
                    twins=twin if is_anchor else (),
                    r_env=np.array([self.reward(r) for r in executed]) if executed else absent,
                    r_wm=r_wm,
                )
            )
        return groups

    def _update(
        self, groups: list[Group], r_env: np.ndarray, f: np.ndarray, earlier: Sequence[Tensor] | None
    ) -> dict[str, float]:
        """Advantages per source, fusion weights (Eq. 5), one GRPO update. earlier: the policy that sampled the anchors."""
        cfg = self.cfg
        anchor = np.array([g.anchor for g in groups])
        rewards = np.where(anchor[:, None], r_env, f)
        advantages, zero_spread = group_advantages(rewards, np.isfinite(rewards), cfg.grpo.advantage_scale)
        wm_ok = self.debias is None or self.debias.ready or not cfg.debias.wait or cfg.anchors.fraction == 0
        weights = self.fusion.weights(int(anchor.sum()), int((~anchor).sum()), wm_ok)
        factors = np.where(anchor, weights.anchor, weights.wm)

        sampled, late = [g.rollouts for g in groups], anchor.tolist()
        n_rollouts = int(np.isfinite(rewards).sum())
        if weights.twin:
            twins = [i for i, g in enumerate(groups) if g.anchor]
            more, _ = group_advantages(f[twins], np.isfinite(f[twins]), cfg.grpo.advantage_scale)
            sampled, late = sampled + [groups[i].twins for i in twins], late + [True] * len(twins)
            rewards, advantages = np.concatenate([rewards, f[twins]]), np.concatenate([advantages, more])
            factors = np.concatenate([factors, np.full(len(twins), weights.twin)])
        rollouts, valid = [r for group in sampled for r in group], np.isfinite(rewards).ravel()
        advantages = (advantages * factors[:, None]).ravel()
        if self.credit is not None:
            within = [w * c for g, r, w in zip(sampled, rewards, factors, strict=True) for c in self.credit(g, r)]
            advantages = [a + c for a, c in zip(advantages, within, strict=True)]
        behaviour = None if earlier is None else (earlier, np.repeat(late, cfg.grpo.group_size))
        with self.ledger.phase("update"), all_cores():
            # Before the calibration is ready nine groups in ten weigh nothing, and the rest is too little for a step: the first
            # anchors serve the calibration alone.
            metrics = self.learner.update(rollouts, advantages, valid, n_rollouts, behaviour) if wm_ok else {"skipped": 1.0}
        metrics = {f"loss/{k}": v for k, v in metrics.items()}
        metrics |= {"fusion/weight_anchor": weights.anchor, "fusion/weight_wm": weights.wm, "fusion/lambda": weights.twin}
        return metrics | {
            "adv/zero_spread_env": float(zero_spread[anchor].mean()) if anchor.any() else float("nan"),
            "adv/zero_spread_wm": float(zero_spread[~anchor].mean()) if (~anchor).any() else float("nan"),
        }

    def _describe(self, groups, r_env, r_wm, f, anchor, ready) -> dict[str, float]:
        """What to look at: real and imagined success side by side, residuals, calibration, spending."""
        metrics = {"anchors/groups": float(anchor.sum())}
        if anchor.any():
            begun = np.array([g.start.progress for g in groups])[anchor]  # starts differ from update to update
            gain = float(np.nanmean(r_env[anchor] - begun[:, None]))
            metrics |= {"reward/env_mean": float(np.nanmean(r_env[anchor])), "success/env": _rate(self.executed)}
            metrics |= {"reward/env_gain": gain}
        if self.imagine is not None:
            twins = [r for g in groups for r in g.twins] if self.grade is None else []
            imagined = [*twins, *(r for g in groups if not g.anchor for r in g.rollouts)]
            metrics |= {"reward/wm_mean": _mean([self.reward(r) for r in imagined]), "success/wm": _rate(imagined)}
            if anchor.any():
                judged = [self.reward(r) for r in twins] if self.grade is None else r_wm[anchor].ravel()
                if not ready:  # a score has another scale than the rewards beside which it would be drawn
                    f = np.full_like(f, np.nan)
                residual = (f[anchor] - r_env[anchor]) ** 2
                metrics |= {
                    "wm/reward_twins": _mean(judged),
                    "wm/success_twins": _rate(twins),
                    "reward/calibrated_mean": _mean(f[np.isfinite(f)]),
                    "calib/spearman": spearman(r_wm[anchor].ravel(), r_env[anchor].ravel()),
                    "calib/residual": _mean(residual[np.isfinite(residual)]),
                }
            metrics |= {f"fusion/{k}": v for k, v in self.fusion.statistics().items()}
            if self.debias is not None:
                metrics |= {"calib/pairs": float(len(self.debias.pairs_)), "calib/slope": self.debias.slope_}
        return metrics | self.ledger.metrics()

    def state_dict(self) -> dict:
        return {
            "learner": self.learner.state_dict(),
            "fusion": self.fusion.state_dict(),
            "debias": None if self.debias is None else self.debias.state_dict(),
            "ledger": self.ledger.state_dict(),
            "late": self.late.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_state_dict(state["learner"])
        self.fusion.load_state_dict(state["fusion"])
        self.ledger.load_state_dict(state["ledger"])
        if self.debias is not None:
            self.debias.load_state_dict(state["debias"])
        self.late.load_state_dict(state.get("late", {"steps": [], "weights": []}), self.learner, self._begin)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _rate(rollouts: Sequence[Outcome]) -> float:
    return float(np.mean([r.success for r in rollouts])) if rollouts else float("nan")


def train(loop: Loop, first: int, after: Callable[[int, dict[str, float]], None]) -> None:
    """Runs updates `first` to `loop.cfg.steps`; `after(step, metrics)` logs, saves and evaluates (steps from 1)."""
    for step in range(first, loop.cfg.steps):
        metrics = loop.step(step)
        after(step + 1, metrics)
