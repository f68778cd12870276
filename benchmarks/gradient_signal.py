"""Is there a direction to go? Signal and noise of the GRPO gradient over real groups of the shipped policy.

    python benchmarks/gradient_signal.py --groups=30 --output=results/gradient_signal/summary.json \\
        --config_path=configs/real_branch.yaml --output_dir=outputs/gradient_signal

One batch of real groups is executed once; every group gives one gradient vector g_i, for each form of reward. The signal
|E g|^2 is estimated without bias by the mean of <g_i, g_j> over i != j, the noise by the mean of |g_i|^2. `groups_needed`
is how many groups a batch must average for the signal to be half of its squared norm; below 0 there is no signal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sim.compose import make_pool
from sim.imagine import task_specs
from sim.launch import Run
from sim.rewards import branch_reward
from vla_wmrl import arguments, grpo
from vla_wmrl.config import TrainConfig
from vla_wmrl.learner import Learner, flatten
from vla_wmrl.tracking import write_json
from vla_wmrl.types import Rollout

Group = tuple[Rollout, ...]


def advantages_at_end(reward: Callable[[Rollout], float]) -> Callable[[Group], list[np.ndarray]]:
    """One advantage a rollout: the reward at the end, less the group's mean."""

    def of(group: Group) -> list[np.ndarray]:
        rewards = np.array([reward(r) for r in group])
        return [np.full(r.looks, a) for r, a in zip(group, rewards - rewards.mean(), strict=True)]

    return of


def advantages_to_go(group: Group) -> list[np.ndarray]:
    """One advantage a look: progress still made from there on, less the mean of the members that are still running."""
    to_go = [r.progress[-1] - r.progress[:-1] for r in group]
    longest = max(len(g) for g in to_go)
    mean = [np.mean([g[k] for g in to_go if len(g) > k]) for k in range(longest)]
    return [g - np.array(mean[: len(g)]) for g in to_go]


def gradient(learner: Learner, group: Group, advantages: list[np.ndarray]) -> torch.Tensor:
    """[P] float32: gradient of the GRPO objective of one group, every rollout weighing the same."""
    looks = flatten(group, np.ones(len(group)), np.ones(len(group), bool))
    weights = grpo.look_weights(looks.rollout, looks.mask, len(group))
    logp = learner.policy.log_prob(*looks.rows(torch.arange(len(looks.mask))))
    loss, _ = grpo.grpo_loss(logp, logp.detach(), torch.from_numpy(np.concatenate(advantages)), weights)
    grads = torch.autograd.grad(loss, learner.parameters, allow_unused=True)
    return torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(learner.parameters, grads, strict=True)])


def signal(vectors: torch.Tensor, seed: int = 0) -> dict[str, float]:
    """Signal, noise and their ratio of gradients [G, P], with a bootstrap interval of the signal over groups."""
    gram = (vectors @ vectors.T).double().numpy()
    n = len(gram)

    def estimate(rows: np.ndarray) -> float:
        part = gram[np.ix_(rows, rows)]
        other = rows[:, None] != rows[None, :]  # a group drawn twice is not a second group
        return float(part[other].mean())

    rng = np.random.default_rng(seed)
    draws = [estimate(rng.integers(0, n, n)) for _ in range(1000)]
    value, noise = estimate(np.arange(n)), float(np.trace(gram) / n)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"groups": n, "signal": value, "signal_low": float(low), "signal_high": float(high), "noise": noise,
            "signal_to_noise": value / noise, "groups_needed": noise / value if value > 0 else -1.0}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=30)
    parser.add_argument("--output", default="results/gradient_signal/summary.json")
    args, rest = parser.parse_known_args()
    cfg = arguments.load(TrainConfig, rest)
    with make_pool(cfg.workers) as pool:
        run = Run(cfg, pool)
        conjuncts = {task: len(spec.goal) for task, spec in task_specs(pool, run.specs).items()}
        run.collect_starts()
        starts = run.starts.draw(0, args.groups)
        groups = run.executor(starts, cfg.grpo.group_size, (cfg.seed, 0)).result()
    forms = {name: advantages_at_end(branch_reward(name, conjuncts)) for name in ("progress", "stage", "milestone")}
    forms |= {"success": advantages_at_end(lambda r: float(r.success)), "progress_to_go": advantages_to_go}
    learner = run.loop.learner
    found = {}
    for name, form in forms.items():
        every = [gradient(learner, group, form(group)) for group in groups]
        found[name] = signal(torch.stack([g for g in every if g.any()]))
        print(name, {k: round(v, 5) for k, v in found[name].items()}, flush=True)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in arguments.encode(cfg).items() if k != "output_dir"}
    write_json(args.output, {"config": settings, "forms": found})


if __name__ == "__main__":
    main()
