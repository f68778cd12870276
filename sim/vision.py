"""Warm-up of the vision tower: learn from the simulator's state where things are, before learning what to do.

A tower of this size that starts from nothing and sees only the flow-matching loss never localises objects well enough
to grasp them; a few hundred steps of regressing positions from its image tokens give it features that do.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from torch import Tensor, nn

from sim.demo_data import DemoData
from vla_wmrl.progress import Progress

LEAST_STD_M = 0.02  # things that hardly move need no more precision than this
QUERIES, HIDDEN = 12, 256


class PositionHead(nn.Module):
    """Attention pooling of image tokens [B, T, D] by learned queries, then positions [B, n_out] of each task."""

    def __init__(self, tokens: int, width: int, tasks: int, outputs: int):
        super().__init__()
        self.query = nn.Parameter(torch.randn(QUERIES, width) * width**-0.5)
        self.place = nn.Parameter(torch.randn(tokens, width) * 0.5)
        self.norm, self.key, self.value = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(QUERIES * width, HIDDEN), nn.GELU())
        self.out = nn.Linear(HIDDEN, tasks * outputs)
        self.outputs = outputs

    def forward(self, tokens: Tensor, task: Tensor) -> Tensor:
        x = self.norm(tokens) + self.place
        weights = torch.softmax(self.key(x) @ self.query.T, dim=1)
        pooled = (weights.transpose(1, 2) @ self.value(x)).flatten(1)
        out = self.out(self.hidden(pooled)).unflatten(1, (-1, self.outputs))
        return out[torch.arange(len(task), device=task.device), task]


def targets(data: DemoData) -> np.ndarray:
    """[L, M + M - 3] float32 metres: positions in the world and relative to the gripper; NaN where there is none."""
    scene = data.scene[data.looks]
    relative = scene[:, 3:] - np.tile(scene[:, :3], (1, scene.shape[1] // 3 - 1))
    return np.concatenate([scene, relative], axis=1)


def warm_up(
    policy: SmolVLAPolicy, data: DemoData, steps: int, batch_size: int, lr: float, seed: int, held_out: float = 0.05
) -> float:
    """Trains vision encoder and connector of `policy` in place; returns the mean error (m) on held-out episodes."""
    device = next(policy.parameters()).device
    vlm = policy.model.vlm_with_expert.get_vlm_model()
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    wanted = targets(data)
    task = data.task[data.looks]
    mean, std = np.zeros_like(wanted[0])[None].repeat(len(data.tasks), 0), None
    std = mean.copy()
    for i in range(len(data.tasks)):
        here = wanted[task == i]
        mean[i], std[i] = np.nan_to_num(here.mean(0)), np.maximum(np.nan_to_num(here.std(0)), LEAST_STD_M)
    episodes = np.unique(data.episode)
    out = rng.choice(episodes, max(1, round(held_out * len(episodes))), replace=False)
    testing = np.isin(data.episode[data.looks], out)
    train, test = np.flatnonzero(~testing), np.flatnonzero(testing)[:512]
    tokens = _tokens(policy, data.images[:1]).shape
    head = PositionHead(tokens[1], tokens[2], len(data.tasks), wanted.shape[1]).to(device)
    trained = [*vlm.vision_model.parameters(), *vlm.connector.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(trained, lr, betas=(0.9, 0.98), weight_decay=0.01)

    def error(rows: np.ndarray) -> Tensor:
        """In units of `std`, NaN where there is no target."""
        at = task[rows]
        goal = torch.from_numpy((wanted[rows] - mean[at]) / std[at]).to(device)
        return head(_tokens(policy, data.images[rows]), torch.from_numpy(at).to(device)) - goal

    def held_out_error() -> float:
        with torch.no_grad():
            groups = np.array_split(test, max(1, len(test) // 64))
            parts = [error(rows).cpu().numpy() * std[task[rows]] for rows in groups]
        distance = np.linalg.norm(np.concatenate(parts).reshape(len(test), -1, 3), axis=2)
        return float(np.nanmean(distance))

    with Progress(steps, "vision warm-up") as bar:
        for step in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
            difference = error(rng.choice(train, min(batch_size, len(train)), replace=False))
            difference = difference[~difference.isnan()]
            loss = nn.functional.smooth_l1_loss(difference, torch.zeros_like(difference), beta=0.1)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
            last = step + 1 == steps
            note = f"error {100 * held_out_error():.2f} cm" if (step + 1) % 250 == 0 or last else ""
            bar.update(1, note)
    return held_out_error()


def _tokens(policy: SmolVLAPolicy, images: np.ndarray) -> Tensor:
    """Image tokens [B, C * n_tokens, D] of all cameras of images [B, C, H, W, 3] uint8."""
    device = next(policy.parameters()).device
    pixels = torch.from_numpy(images).to(device).permute(0, 1, 4, 2, 3).to(torch.float32) / 127.5 - 1.0
    embed = policy.model.vlm_with_expert.embed_image
    return torch.cat([embed(pixels[:, camera]) for camera in range(pixels.shape[1])], dim=1)
