"""What does an update gain on starts that it has not seen? A step along the gradient, along its sign, or a fit by L-BFGS.

    python benchmarks/update_rules.py --groups=400 --output=results/update_rules/summary.json \\
        --config_path=configs/libero_long.yaml --output_dir=outputs/update_rules

Groups are imagined once. Two thirds of them (by initial state) train, the others test: `gain` is the importance-weighted
reward that the updated policy would have collected at the explored look, less what the old one did, per rollout: mean of
A (pi_new / pi_old - 1), with its standard error over groups. `kl`: nats a look, all action dimensions, on the tested looks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gradient_signal import gradients
from sim.compose import make_pool
from sim.launch import Run
from vla_wmrl import arguments
from vla_wmrl.config import TrainConfig
from vla_wmrl.learner import Learner
from vla_wmrl.tracking import write_json

KLS = (0.005, 0.02, 0.08)
PENALTIES = (0.3, 0.1, 0.03)  # grpo.kl_old
SEARCH = 6  # rescalings until a step has its size; KL grows with the square


class Measure:
    """Gain and size of whatever the policy has become, on some groups."""

    def __init__(self, policy, groups, reward):
        self.policy = policy
        rewards = np.array([[reward(r) for r in g] for g in groups])
        rollouts = [r for g in groups for r in g]
        looks = policy.collate(
            rollouts, (rewards - rewards.mean(1, keepdims=True)).ravel() + 1e-12, np.ones(len(rollouts), bool)
        )
        self.parts = [looks.rows(part) for part in looks.split(torch.nonzero(looks.mask).flatten(), 512)]
        self.advantage = looks.advantage[looks.mask].numpy()
        self.size = rewards.shape[1]
        self.before = self._now()

    @torch.no_grad()
    def _now(self):
        logp = torch.cat([self.policy.log_prob(*part) for part in self.parts]).double().numpy()
        return logp, torch.cat([self.policy.centre(*part) for part in self.parts])

    def __call__(self) -> dict[str, float]:
        logp, centre = self._now()
        each = self.advantage * np.expm1((logp - self.before[0]).clip(-5, 5))
        group = each.reshape(-1, self.size).mean(1)
        kl = 0.5 * (centre - self.before[1]).square().mean(1).sum(1).mean()
        return {"gain": float(group.mean()), "standard_error": float(group.std() / len(group) ** 0.5), "kl": float(kl)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--output", default="results/update_rules/summary.json")
    args, rest = parser.parse_known_args()
    cfg = arguments.load(TrainConfig, rest)
    with make_pool(cfg.workers) as pool:
        run = Run(cfg, pool)
        run.collect_starts()
    reward, policy = run.loop.reward, run.policy
    starts = run.starts.draw(0, args.groups)
    groups = imagine_groups(run.world.model, run.policy, starts, cfg.grpo.group_size, (cfg.seed, 0), cfg.groups)
    contrast = float(np.mean([len({reward(r) for r in g}) > 1 for g in groups]))
    train = [g for g in groups if g[0].start.init_id % 3]
    held = [g for g in groups if g[0].start.init_id % 3 == 0]
    seen, unseen = Measure(policy, train, reward), Measure(policy, held, reward)
    parameters = [p for _, p in policy.parameters_to_train()]
    base = [p.detach().clone() for p in parameters]
    rows: list[dict] = []

    def put(direction: list[torch.Tensor] | None = None, scale: float = 0.0) -> None:
        for i, (p, b) in enumerate(zip(parameters, base, strict=True)):
            p.data.copy_(b if direction is None else b + scale * direction[i])

    def note(rule: str, setting: float) -> None:
        rows.append({"rule": rule, "setting": setting, "train": seen(), "test": unseen()})
        print(rows[-1], flush=True)
        put()

    vectors = gradients(run.loop.learner, train, reward)
    flat = -vectors.mean(0)
    ascent = [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    for rule, direction in (("gradient", ascent), ("sign of the gradient", [x.sign() for x in ascent])):
        for kl in KLS:
            scale = 1e-2 / float(torch.cat([x.flatten() for x in direction]).norm())
            for _ in range(SEARCH):
                put(direction, scale)
                scale *= (kl / max(unseen()["kl"], 1e-12)) ** 0.5
            put(direction, scale)
            note(rule, kl)
    rewards = np.array([[reward(r) for r in g] for g in train])
    advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()
    for kl_old in PENALTIES:
        learner = Learner(policy, replace(cfg.grpo, optimizer="lbfgs", kl_old=kl_old, target_kl=None))
        learner.update([r for g in train for r in g], advantages, np.ones(len(advantages), bool), len(advantages))
        note("L-BFGS, weight of KL", kl_old)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in arguments.encode(cfg).items() if k != "output_dir"}
    counts = {"train": len(train), "test": len(held), "contrast": contrast}
    write_json(args.output, {"config": settings, "groups": counts, "rows": rows})


if __name__ == "__main__":
    main()
