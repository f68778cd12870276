"""What does one update do? Steps along the GRPO gradient and along random directions, at given sizes in policy space.

    python benchmarks/update_effect.py --groups=240 --output=results/update_effect/summary.json \\
        --config_path=configs/libero_long.yaml --output_dir=outputs/update_effect

Everything happens in the world model, which is cheap enough to repeat: the gradient comes from imagined groups of some
starts; each candidate step is scaled until the policy has moved by `kl` nats a look (on the looks of those groups), and the
deterministic policy is then imagined from other starts, the same for all candidates. `gain` is paired with the policy before
the step, and also given by the stage of progress at the start: a gain at one stage that is paid for at another shows here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gradient_signal import describe, gradients
from sim.compose import make_pool
from sim.imagine import task_specs
from sim.launch import Run
from sim.rewards import branch_reward
from vla_wmrl import arguments
from vla_wmrl.config import TrainConfig
from vla_wmrl.tracking import write_json

KLS = (0.003, 0.03, 0.2)
PROBES = 512  # looks on which the size of a step is measured
SEARCH = 6  # rescalings until a step has its size; KL grows with the square


class Candidates:
    """Moves the policy along directions by a given KL, and back."""

    def __init__(self, run: Run, groups):
        self.policy, self.parameters = run.policy, run.loop.learner.parameters
        self.base = [p.detach().clone() for p in self.parameters]
        looks = [(r, k) for g in groups for r in g[:1] for k in range(r.looks)]
        chosen = np.random.default_rng(0).choice(len(looks), min(PROBES, len(looks)), replace=False)
        picked = [looks[i] for i in chosen]
        names = picked[0][0].inputs
        self.inputs = {n: torch.from_numpy(np.stack([r.inputs[n][k] for r, k in picked])) for n in names}
        self.noise = torch.from_numpy(np.stack([r.chain[k, 0] for r, k in picked]))
        self.before = self._means()

    @torch.no_grad()
    def _means(self) -> torch.Tensor:
        return self.policy.smooth.coordinates(self.policy.integrate(self.inputs, self.noise, None, None)[:, -1])

    def kl(self) -> float:
        """KL (nats a look) between the exploring policies before and now."""
        return float((self._means() - self.before).square().sum((1, 2)).mean() / (2 * self.policy.eta**2))

    def move(self, direction: torch.Tensor, kl: float) -> None:
        scale = 1e-2 / float(direction.norm())
        for _ in range(SEARCH):
            self._set(direction, scale)
            scale *= (kl / max(self.kl(), 1e-12)) ** 0.5
        self._set(direction, scale)

    def _set(self, direction: torch.Tensor, scale: float) -> None:
        parts = direction.split([p.numel() for p in self.parameters])
        for p, base, part in zip(self.parameters, self.base, parts, strict=True):
            p.data.copy_(base + scale * part.view_as(base))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=240)
    parser.add_argument("--tests", type=int, default=320)
    parser.add_argument("--output", default="results/update_effect/summary.json")
    args, rest = parser.parse_known_args()
    cfg = arguments.load(TrainConfig, rest)
    with make_pool(cfg.workers) as pool:
        run = Run(cfg, pool)
        reward = branch_reward(cfg.groups.reward, {t: len(s.goal) for t, s in task_specs(pool, run.specs).items()})
        run.collect_starts()
    starts, tests = run.starts.draw(0, args.groups), run.starts.draw(1, args.tests)
    groups = run.world(starts, cfg.grpo.group_size, (cfg.seed, 0))
    vectors = gradients(run.loop.learner, groups, reward)
    ascent = -vectors.mean(0)

    def imagined() -> np.ndarray:
        model, looks = run.world.model, cfg.groups.looks
        rollouts = model.imagine(run.policy, tests, [0] * len(tests), (cfg.seed, 1), looks, stochastic=False)
        return np.array([reward(r) for r in rollouts])

    before, stage = imagined(), np.array([int(10 * s.progress) for s in tests])
    candidates, rows = Candidates(run, groups), []
    generator = torch.Generator().manual_seed(cfg.seed)
    random = torch.randn(len(ascent), generator=generator)
    for name, direction in (("gradient", ascent), ("sign of it", ascent.sign()), ("random", random), ("against it", -ascent)):
        for kl in KLS:
            candidates.move(direction, kl)
            gain = imagined() - before
            by_stage = {int(s): [int((stage == s).sum()), float(gain[stage == s].mean())] for s in np.unique(stage)}
            error = float(gain.std() / len(gain) ** 0.5)
            rows.append({"direction": name, "kl": candidates.kl(), "gain": float(gain.mean()), "standard_error": error,
                         "by_stage": by_stage})  # fmt: skip
            print(rows[-1], flush=True)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in arguments.encode(cfg).items() if k != "output_dir"}
    write_json(args.output, {"config": settings, "before": float(before.mean()), "gradient": describe(vectors), "rows": rows})


if __name__ == "__main__":
    main()
