"""The state-space world model: fitted on real trajectories, imagines a policy's rollouts in closed loop.

State in, state out: starts come with the simulator's state, and a decoder turns imagined states into the policy's own
(frozen) vision features. Nothing here renders or simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_wmrl import checkpoint
from vla_wmrl.errors import UserError
from vla_wmrl.policies.base import Policy
from vla_wmrl.policies.noise import generator
from vla_wmrl.types import Rollout, Start
from vla_wmrl.world_model.base import ImaginedRollout, Kind, TaskSpec
from vla_wmrl.world_model.data import Corpus, Windows
from vla_wmrl.world_model.decoder import Decoder
from vla_wmrl.world_model.dynamics import NOISE_SCALE, Dynamics, Scene, roll
from vla_wmrl.world_model.imagination import Until, imagine
from vla_wmrl.world_model.scene import Scenes

STREAM = 41  # of the noise key
NOISE_STEPS = 4  # of a window that tell what one step adds to the error


@dataclass(frozen=True)
class FitConfig:
    """How the dynamics are fitted. Windows grow over the fit: (fraction of the updates, horizon, batch)."""

    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    stages: tuple[tuple[float, int, int], ...] = ((0.4, 4, 384), (0.75, 16, 128), (0.92, 40, 64), (1.0, 64, 64))
    grades_weight: float = 0.15
    noise_weight: float = 0.02
    clip: float = 1.0


# Huber units: an error of one unit is where the loss turns linear
EEF_UNIT, EEF_TURN_UNIT, FINGER_UNIT, BODY_UNIT, BODY_TURN_UNIT = 0.005, 0.005, 0.003, 0.01, 0.25


class StateSpaceModel:
    """A world model over all of `tasks`. Deterministic given `seed` and the data in the order it came."""

    def __init__(self, tasks: dict[int, TaskSpec], seed: int = 0, width: int = 128, config: FitConfig | None = None):
        self.config = config or FitConfig()
        self.tasks = dict(tasks)
        self.scenes = Scenes(list(tasks.values()))
        self.seed, self.width = seed, width
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = Dynamics(len(self.scenes.types), len(self.scenes.other_types), len(tasks), width)
        self.decoder = Decoder(self.tasks, seed)
        self.corpus = Corpus(self.scenes)
        self.rest_: dict[tuple[int, str], float] = {}
        self.updates_ = 0

    # ---- learning
    def observe(self, traces: Sequence[Any], kind: Kind) -> None:
        """Adds real trajectories (the fields of Trajectory) to what `fit` learns from."""
        self.corpus.add(traces, kind)
        if self.updates_ == 0:
            self.rest_ = dict(self.corpus.rest)
        else:  # features must not shift under fitted weights
            self.rest_ = {**self.corpus.rest, **self.rest_}
        self.corpus.rest = dict(self.rest_)

    def observe_looks(self, rollouts: Sequence[Rollout]) -> None:
        """Adds real looks (states, and the features that the policy's vision gave there) for `fit_decoder`."""
        for r in rollouts:
            if r.source == "real":
                self.decoder.observe(r.start.task_id, r.states[: r.looks], r.inputs["features"])

    def fit_decoder(self, policy: Policy, updates: int, log: Any = None) -> None:
        """`updates` gradient steps per task of the decoder from states to `policy`'s vision features."""
        self.decoder.fit(policy, updates, log=log)

    def fit(self, updates: int, log: Any = None) -> dict[str, float]:
        """`updates` gradient steps on what was observed; a second call goes on from the first. Returns the last losses.

        A first fit goes through the stages of growing windows. A later one takes them in turn: branches end where they are
        decided, so that the longest windows alone would show it failures and hide the successes.
        """
        first = self.updates_ == 0
        rng = generator((self.seed, self.updates_), STREAM)
        optimiser = torch.optim.AdamW(self.net.parameters(), self.config.learning_rate, weight_decay=self.config.weight_decay)
        peak = self.config.learning_rate * (1.0 if first else 0.5)
        recent: list[dict[str, float]] = []
        known = [s for s in self.config.stages if self.corpus.has(s[1])]
        if updates and not known:
            shortest = min(s[1] for s in self.config.stages)
            raise UserError(f"the world model has no trajectory of {shortest} control steps or more to fit: run longer ones")
        for i in range(updates):
            done = i / updates
            stage = next((s for s in known if done < s[0]), known[-1]) if first else known[i % len(known)]
            rate = peak * min(1.0, (i + 1) / 50) * (1.0 if done < 0.6 else max(0.03, (1 - done) / 0.4))
            for group in optimiser.param_groups:
                group["lr"] = rate
            losses = self.losses(self.corpus.sample(rng, stage[2], stage[1]), rng)
            total = sum(losses.values())
            optimiser.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.config.clip)
            optimiser.step()
            self.updates_ += 1
            recent = [*recent[-49:], {k: float(v.detach()) for k, v in losses.items()}]
            if log is not None:
                log(i, stage[1], {k: float(np.mean([r[k] for r in recent])) for k in recent[-1]})
        return {k: float(np.mean([r[k] for r in recent])) for k in recent[-1]} if recent else {}

    def fit_grades(self, updates: int, batch: int = 256, horizon: int = 4) -> float:
        """`updates` gradient steps of the heads alone, on real states: cheap, for labels that came after the dynamics.

        Returns the last loss.
        """
        heads = [p for name, p in self.net.named_parameters() if name.startswith("grade_")]
        optimiser = torch.optim.AdamW(heads, self.config.learning_rate, weight_decay=self.config.weight_decay)
        rng, loss = generator((self.seed, self.updates_, updates), STREAM), torch.zeros(())
        for i in range(updates):
            for group in optimiser.param_groups:
                group["lr"] = self.config.learning_rate * max(0.03, 1 - i / updates)
            w = self.corpus.sample(rng, batch, horizon)
            real = Scene(w.robot[:, -1], w.bodies[:, -1])
            loss = self._grades_loss(real, w.context, w.held[:, -1], w.success[:, -1], w.progress[:, -1], w.eventual)
            for p, g in zip(heads, torch.autograd.grad(loss, heads, allow_unused=True), strict=True):
                p.grad = g
            optimiser.step()
        self.updates_ += updates
        return float(loss.detach())

    def losses(self, w: Windows, rng: np.random.Generator) -> dict[str, Tensor]:
        """Weighted terms of the loss on windows: path, noise scale, grades of the real and of the imagined states."""
        c = self.config
        jitter = torch.from_numpy(rng.standard_normal((len(w.robot), 3), dtype=np.float32)) * 5e-4
        robot = w.robot[:, 0].clone()
        robot[:, :3] += jitter
        path, scales = roll(self.net, Scene(robot, w.bodies[:, 0]), w.context, w.actions, w.previous)
        present = w.context.present[:, None, :, None]
        rows = present.sum() * path.robot.shape[1]
        huber = lambda error: F.huber_loss(error, torch.zeros_like(error), reduction="none")  # noqa: E731
        hand = (path.robot - w.robot[:, 1:])[..., :11]
        unit = hand.new_tensor([EEF_UNIT] * 3 + [EEF_TURN_UNIT] * 6 + [FINGER_UNIT] * 2)
        body = (path.bodies - w.bodies[:, 1:])[..., :9] * present
        body_unit = body.new_tensor([BODY_UNIT] * 3 + [BODY_TURN_UNIT] * 6)
        losses = {
            "hand": huber(hand / unit).mean(),
            "bodies": 2.0 * huber(body / body_unit).sum() / (9 * rows),
        }
        losses["noise"] = c.noise_weight * self._noise_loss(path, scales, w, jitter)
        every = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
        steps = path.robot.shape[1]
        context = w.context.rows(torch.arange(len(robot)).repeat_interleave(steps))
        thin = torch.arange(0, steps * len(robot), 4)  # neighbouring states say the same
        imagined = Scene(every(path.robot)[thin], every(path.bodies)[thin])
        real = Scene(every(w.robot[:, 1:])[thin], every(w.bodies[:, 1:])[thin])
        context = context.rows(thin)
        aims = (every(w.held[:, 1:])[thin], every(w.success[:, 1:])[thin], every(w.progress[:, 1:])[thin],
                w.eventual.repeat_interleave(steps)[thin])  # fmt: skip
        losses["grades"] = c.grades_weight * self._grades_loss(real, context, *aims)
        losses["imagined_grades"] = c.grades_weight * self._grades_loss(imagined, context, *aims)
        return losses

    def _noise_loss(self, path: Scene, scales: Tensor, w: Windows, jitter: Tensor) -> Tensor:
        """Likelihood of what one step adds to the error, for the scale only.

        Laplace's, and of a window's first steps: otherwise the scale would be that of the few contacts that go wrong, and of
        paths that went apart long before, and shake every hand that moves freely. `jitter` [B, 3]: the hand's error before the
        first step, which no step added.
        """
        near, real, scales = Scene(*(x[:, :NOISE_STEPS] for x in path)), slice(1, NOISE_STEPS + 1), scales[:, :NOISE_STEPS]
        errors = torch.cat([(near.robot - w.robot[:, real])[:, :, None, :3], (near.bodies - w.bodies[:, real])[..., :3]], dim=2)
        before = torch.zeros_like(errors[:, :1])
        before[:, 0, 0] = jitter
        steps = torch.diff(errors.detach(), dim=1, prepend=before)
        present = torch.cat([torch.ones_like(w.context.present[:, :1]), w.context.present], dim=1)[:, None]
        log_scale = scales.clamp(-6, 3)
        size = (steps.abs() / NOISE_SCALE).clamp(max=30).mean(-1)
        return ((2**0.5 * size * torch.exp(-log_scale) + log_scale) * present).sum() / (present.sum() * steps.shape[1])

    def _grades_loss(self, scene: Scene, context, held: Tensor, success: Tensor, progress: Tensor, eventual: Tensor):
        grades = self.net.grade(scene, context)
        wanted = context.present
        bce = F.binary_cross_entropy_with_logits
        loss = (bce(grades.held, held, reduction="none") * wanted).sum() / wanted.sum()
        log_p = self.net.log_success(grades, context).clamp(max=-1e-6)
        loss = loss - (success * log_p + (1 - success) * torch.log(-torch.expm1(log_p))).mean()
        for logit, aim, weight in ((grades.progress, progress, 2.0), (grades.value, eventual, 1.0)):
            known = ~aim.isnan()
            if known.any():
                loss = loss + weight * bce(logit[known], aim[known])
        return loss

    # ---- predicting
    def scene(self, task_id: int, states: np.ndarray):
        """Scene and Context of states [B, S] of one task."""
        return Scene(*self.scenes.read(task_id, states)), self.scenes.context(task_id, states, self.rest_)

    @torch.no_grad()
    def predict(self, task_id: int, states: np.ndarray, actions: np.ndarray, previous: np.ndarray):
        """Open loop: Scene, Grades (leaves [B, T, ...]), log P(success) [B, T]; states [B, S], actions [B, T, 7]."""
        scene, context = self.scene(task_id, states)
        as_tensor = lambda x: torch.as_tensor(np.asarray(x), dtype=torch.float32)  # noqa: E731
        path, _ = roll(self.net, scene, context, as_tensor(actions), as_tensor(previous))
        n, t = path.robot.shape[:2]
        wide = context.rows(torch.arange(n).repeat_interleave(t))
        grades = self.net.grade(Scene(path.robot.flatten(0, 1), path.bodies.flatten(0, 1)), wide)
        log_p = self.net.log_success(grades, wide)
        return path, type(grades)(*(g.unflatten(0, (n, t)) for g in grades)), log_p.unflatten(0, (n, t))

    def imagine(
        self,
        policy: Policy,
        starts: Sequence[Start],
        members: Sequence[int],
        seed: Sequence[int],
        looks: int,
        stochastic: bool = True,
        noisy: bool = True,
        threshold: float = 0.5,
        explore_looks: int | None = None,
        until: Until | None = None,
        look_noise: bool = False,
    ) -> list[ImaginedRollout]:
        """Closed-loop rollouts of `policy`, one per (start, member); see world_model.imagination."""
        return imagine(
            self, policy, starts, members, seed, looks, stochastic, noisy, threshold, explore_looks, until, look_noise
        )

    # ---- state
    def state_dict(self, data: bool = False) -> dict[str, Any]:
        """Weights and what was fitted besides; with `data` also the trajectories and looks, so that a fit can go on."""
        state = {
            "tasks": [asdict(self.tasks[t]) for t in sorted(self.tasks)],
            "width": self.width,
            "net": {k: v.clone() for k, v in self.net.state_dict().items()},
            "rest": [[task, name, height] for (task, name), height in sorted(self.rest_.items())],
            "updates": self.updates_,
            "decoder": self.decoder.state_dict(data),
        }
        return {**state, "corpus": self.corpus.state_dict()} if data else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError when `state` was fitted for tasks with other layouts."""
        stored = [task_from_json(t) for t in state["tasks"]]
        if [(t.task_id, t.layout, t.goal) for t in stored] != [
            (i, self.tasks[i].layout, self.tasks[i].goal) for i in sorted(self.tasks)
        ]:
            names = ", ".join(str(t.task_id) for t in stored)
            raise UserError(f"the world model was fitted for other tasks or state layouts (tasks {names}): fit a new one")
        try:
            self.net.load_state_dict(state["net"])
        except RuntimeError as error:  # torch lists every layer
            raise UserError("the world model was fitted by a version with other dynamics: fit a new one") from error
        self.rest_ = {(int(task), name): float(height) for task, name, height in state["rest"]}
        self.corpus.rest = dict(self.rest_)
        self.updates_ = int(state["updates"])
        self.decoder.load_state_dict(state["decoder"])
        if "corpus" in state:
            self.corpus.load_state_dict(state["corpus"])

    def save(self, folder: str | Path, data: bool = False) -> None:
        """Writes safetensors and JSON under `folder`; with `data` also what it learned from."""
        checkpoint.save(folder, self.updates_, self.state_dict(data), keep=1)

    @classmethod
    def from_pretrained(cls, folder: str | Path, tasks: dict[int, TaskSpec] | None = None, seed: int = 0) -> StateSpaceModel:
        """What `save` wrote. Raises UserError when there is nothing, or it does not know one of `tasks`."""
        newest = checkpoint.latest(folder)
        if newest is None:
            raise UserError(f"no world model at {folder}: name a folder that holds one, or fit one")
        state = checkpoint.load(newest)
        stored = {t.task_id: t for t in map(task_from_json, state["tasks"])}
        for task in (tasks or {}).values():
            if task.task_id not in stored or stored[task.task_id].layout != task.layout:
                raise UserError(
                    f"the world model at {folder} knows tasks {sorted(stored)}, not task {task.task_id} as it is here"
                )
        model = cls(stored, seed, int(state["width"]))
        model.load_state_dict(state)
        return model


def task_from_json(fields: dict[str, Any]) -> TaskSpec:
    """TaskSpec from plain JSON."""
    layout = {name: (int(span[0]), int(span[1])) for name, span in fields["layout"].items()}
    lists = {k: tuple(fields[k]) for k in ("objects", "fixtures", "joints")}
    return TaskSpec(fields["task_id"], fields["language"], layout, goal=tuple(tuple(g) for g in fields["goal"]), **lists)
