"""From a state to what the frozen vision of a policy would show it: a small regression on principal components.

Feature error alone is a poor guide: what counts is that the policy acts the same. So the end of the fit has a second term,
the distance between the chunks that the frozen policy samples, with the same noise, from true and from decoded features.

The looks must be where the policy goes: a decoder fitted on demonstrations alone missed more of the features' variance than
their mean does (2.0 of it, task 7) in the states of a policy that fails half of its grasps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_wmrl.errors import UserError
from vla_wmrl.policies.noise import generator
from vla_wmrl.world_model.base import TaskSpec
from vla_wmrl.world_model.geometry import matrix, rot6
from vla_wmrl.world_model.scene import proprioception

STREAM, RESIDUALS = 42, 44  # of the noise key
JITTER = 4  # looks that a residual may be taken before or after its own place in an episode
STILL = 1e-4  # a component of the state that varies less is constant
MIN_LOOKS = 16


class TaskDecoder(nn.Module):
    """State [B, S'] -> features [B, n_tokens * D], for one task and one policy's vision."""

    def __init__(self, inputs: int, outputs: int, components: int, width: int = 384):
        super().__init__()
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))
        self.register_buffer("centre", torch.zeros(outputs))
        self.register_buffer("basis", torch.zeros(components, outputs))
        self.linear = nn.Linear(inputs, components)
        hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.SiLU())]
        self.net = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), *hidden, nn.Linear(width, components))

    def forward(self, x: Tensor) -> Tensor:
        x = ((x - self.mean) * self.scale).clamp(-4, 4)
        return self.centre + (self.linear(x) + self.net(x)) @ self.basis


class Decoder:
    """Decoders of all tasks. `observe` adds looks; `fit` goes on from where it was."""

    def __init__(self, tasks: dict[int, TaskSpec], seed: int = 0, components: int = 192):
        self.tasks, self.seed, self.components = tasks, seed, components
        self.nets: dict[int, TaskDecoder] = {}
        self.looks: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.residuals: dict[int, list[Tensor]] = {}  # [n, n_tokens * D] float16 of one real episode each
        self.shape: tuple[int, int] = (0, 0)  # n_tokens, D
        self.updates_ = 0

    def observe(self, task_id: int, states: np.ndarray, features: np.ndarray) -> None:
        """Adds looks: states [n, S], features [n, n_tokens, D] that the policy's vision gave there."""
        self.shape = tuple(features.shape[1:])
        self.looks.setdefault(task_id, []).append((np.asarray(states, np.float32), np.asarray(features, np.float32)))

    def visible(self, task_id: int, states: Tensor) -> Tensor:
        """[n, S'] what of states [n, S] can be seen: poses, fingers and joints, no velocities."""
        layout = self.tasks[task_id].layout
        parts = []
        for name, (first, last) in layout.items():
            part = states[:, first:last]
            if name.endswith(("/pos", "/eef_pos", "/gripper_qpos", "/qpos")) or name == "robot/eef_rot":
                parts.append(part)
            elif name.endswith("/rot"):
                parts.append(rot6(matrix(part)))
        return torch.cat(parts, dim=-1)

    def _begin(self, task_id: int, x: Tensor, y: Tensor) -> TaskDecoder:
        """Input scales, principal components and a ridge regression: a good start."""
        if len(x) < MIN_LOOKS:
            raise UserError(f"the feature decoder of task {task_id} needs {MIN_LOOKS} looks, it has {len(x)}")
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            net = TaskDecoder(x.shape[1], y.shape[1], min(self.components, len(x) - 1, y.shape[1]))
            net.centre.copy_(y.mean(0))
            _, s, v = torch.svd_lowrank(y - net.centre, q=len(net.basis), niter=3)
        spread = x.std(0)
        net.mean.copy_(x.mean(0))
        net.scale.copy_(torch.where(spread > STILL, 1 / spread.clamp(min=STILL), torch.zeros_like(spread)))
        net.basis.copy_((v * (s / len(x) ** 0.5)).T)  # coefficients of about unit variance
        with torch.no_grad():
            z = ((x - net.mean) * net.scale).clamp(-4, 4)
            aim = (y - net.centre) @ (net.basis.T / net.basis.square().sum(1))
            ridge = torch.linalg.solve(z.T @ z + 0.01 * len(z) * torch.eye(z.shape[1]), z.T @ aim)
            net.linear.weight.copy_(ridge.T)
            net.linear.bias.copy_(aim.mean(0))
            net.net[-1].weight.mul_(0.01)
            net.net[-1].bias.zero_()
        return net

    def fit(
        self, policy: Any, updates: int, batch: int = 256, match: int = 16, match_from: float = 0.92, log: Any = None
    ) -> None:
        """`updates` gradient steps per task; the last part of them with the action-matching term on `match` looks.

        `policy`: a FlowPolicy, whose weights stay as they are.
        """
        for task_id, looks in sorted(self.looks.items()):
            states = torch.from_numpy(np.concatenate([s for s, _ in looks]))
            y = torch.from_numpy(np.concatenate([f for _, f in looks])).flatten(1)
            x = self.visible(task_id, states)
            if task_id not in self.nets:
                self.nets[task_id] = self._begin(task_id, x, y)
            net, unit = self.nets[task_id], y.std()
            rng = generator((self.seed, task_id, self.updates_), STREAM)
            optimiser = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-2)
            for i in range(updates):
                for group in optimiser.param_groups:
                    group["lr"] = 1e-3 * min(1.0, (i + 1) / 50) * max(0.03, 1 - i / updates)
                rows = torch.from_numpy(rng.integers(len(x), size=batch))
                loss = ((net(x[rows]) - y[rows]) / unit).square().mean()
                gap = torch.zeros(())
                if match and i >= match_from * updates:
                    rows = rows[:match]
                    gap = self.action_gap(policy, task_id, states[rows], net(x[rows]), y[rows], rng)
                optimiser.zero_grad()
                grads = torch.autograd.grad(loss + 2.0 * gap, list(net.parameters()))
                for p, g in zip(net.parameters(), grads, strict=True):
                    p.grad = g
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimiser.step()
                if log is not None:
                    log(task_id, i, float(loss.detach()), float(gap.detach()))
        self.updates_ += updates

    @torch.no_grad()
    def check(self, policy: Any, task_id: int, states: np.ndarray, features: np.ndarray, seed: int = 0) -> dict[str, float]:
        """On looks that were not fitted: share of the features' variance missed, action gap, gripper agreement."""
        x, y = (
            torch.from_numpy(np.asarray(states, np.float32)),
            torch.from_numpy(np.asarray(features, np.float32)).flatten(1),
        )
        decoded, rng = self.nets[task_id](self.visible(task_id, x)), generator((seed, task_id), STREAM)
        ours, true = (c[:, : policy.n_action_steps] for c in self._chunks(policy, task_id, x, (decoded, y), rng))
        return {
            "n": len(x),
            "features_missed": float((decoded - y).square().sum() / (y - y.mean(0)).square().sum()),
            "action_gap": float((ours - true).abs().mean()),
            "action_size": float(true.abs().mean()),
            "action_spread": float((true - true.mean((0, 1))).abs().mean()),
            "gripper_agrees": float(((ours[..., -1] > 0) == (true[..., -1] > 0)).float().mean()),
        }

    def action_gap(self, policy: Any, task_id: int, states: Tensor, decoded: Tensor, true: Tensor, rng) -> Tensor:
        """Mean absolute difference of the executed normalised actions, sampled with the same noise from both."""
        ours, real = self._chunks(policy, task_id, states, (decoded, true), rng)
        return (ours - real).abs()[:, : policy.n_action_steps].mean()

    def _chunks(
        self, policy: Any, task_id: int, states: Tensor, features: Sequence[Tensor], rng: np.random.Generator
    ) -> list[Tensor]:
        """Chunks [n, H, A] (normalised) that `policy` samples at `states` from each of `features`, same noise."""
        noise = torch.from_numpy(rng.standard_normal((len(states), policy.horizon, policy.padded_dim), dtype=np.float32))
        first, _ = self.tasks[task_id].layout["robot/eef_pos"]
        state, language = proprioception(states[:, first : first + 16]), [self.tasks[task_id].language] * len(states)
        chunks = []
        for seen in features:
            inputs = policy.inputs_from_features(seen.unflatten(1, self.shape), state, language)
            with torch.set_grad_enabled(seen.requires_grad):
                chunks.append(policy.integrate(inputs, noise, None, None)[:, -1, :, : policy.action_dim])
        return chunks

    @torch.no_grad()
    def __call__(self, task_id: int, states: np.ndarray, looks: Sequence[tuple[tuple[int, ...], int]] | None = None) -> Tensor:
        """[n, n_tokens, D] float32 for states [n, S].

        `looks`: (key of the rollout, look of the episode) of every row, to add what real looks had that a decoder leaves out.
        Without, an object's place can be read off decoded features more precisely than off any image.
        """
        if task_id not in self.nets:
            raise UserError(f"the world model has no feature decoder for task {task_id}: observe looks of it and fit")
        decoded = self.nets[task_id](self.visible(task_id, torch.from_numpy(states)))
        if looks is not None:
            decoded = decoded + torch.stack([self._residual(task_id, key, look) for key, look in looks])
        return decoded.unflatten(1, self.shape)

    def keep_residuals(self) -> None:
        """Keeps what the observed looks, each item a whole episode from its beginning, have that the decoder leaves out."""
        self.residuals = {}
        for task_id, looks in self.looks.items():
            for states, features in looks:
                left_out = torch.from_numpy(features) - self(task_id, states)
                self.residuals.setdefault(task_id, []).append(left_out.flatten(1).half())

    def _residual(self, task_id: int, key: tuple[int, ...], look: int) -> Tensor:
        """[n_tokens * D] of about this look in one real episode, which the rollout keeps: errors of seeing last."""
        episodes = self.residuals.get(task_id)
        if not episodes:
            raise UserError(f"no real look of task {task_id} was seen, to take the noise of imagined looks from")
        rng = generator(key, RESIDUALS)
        episode, shift = episodes[int(rng.integers(len(episodes)))], int(rng.integers(-JITTER, JITTER + 1))
        return episode[min(max(look + shift, 0), len(episode) - 1)].float()

    def state_dict(self, data: bool = False) -> dict[str, Any]:
        state = {
            "shape": list(self.shape),
            "updates": self.updates_,
            "nets": {str(task): {k: v.clone() for k, v in net.state_dict().items()} for task, net in self.nets.items()},
            "residuals": {str(task): list(episodes) for task, episodes in self.residuals.items()},
        }
        looks = {str(task): list(pairs) for task, pairs in self.looks.items()}
        return {**state, "looks": looks} if data else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shape, self.updates_ = tuple(state["shape"]), int(state["updates"])
        if "looks" in state:
            self.looks = {int(task): [tuple(pair) for pair in pairs] for task, pairs in state["looks"].items()}
        self.residuals = {int(task): list(episodes) for task, episodes in state.get("residuals", {}).items()}
        self.nets = {}
        for task, weights in state["nets"].items():
            components, outputs = weights["basis"].shape
            net = TaskDecoder(len(weights["mean"]), outputs, components, weights["net.0.weight"].shape[0])
            net.load_state_dict(weights)
            self.nets[int(task)] = net
