"""Is there a direction to go, and does the world model see it? Signal and noise of the GRPO gradient over groups of the
shipped policy, executed for real and (with a world model in the config) imagined from the same starts.

    python benchmarks/gradient_signal.py --groups=90 --output=results/gradient_signal/summary.json \\
        --config_path=configs/libero_long.yaml --output_dir=outputs/gradient_signal

Every group gives one gradient vector g_i for each form of reward.
* signal: |E g|^2, without bias, by the mean of <g_i, g_j> over i != j; noise: the mean of |g_i|^2. `groups_needed` is how
  many groups a batch must average for the signal to be half of its squared norm; below 0 there is no signal.
* start_signal: E |g at a start|^2, without bias, by <gradient of one half of the members, gradient of the other half>.
  Far above `signal`, each start wants something else, and what helps one is lost on the others (coherence = their ratio).
* cosine of imagined and real: mean of <real g_i, imagined g_j> over i != j, over the root of both signals. It may leave
  [-1, 1], since all three are estimates.
Intervals are bootstrapped over groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sim.compose import make_pool
from sim.imagine import imagine_groups, task_specs
from sim.launch import Run
from sim.rewards import branch_reward
from vla_wmrl import arguments, grpo
from vla_wmrl.config import TrainConfig
from vla_wmrl.learner import Learner
from vla_wmrl.tracking import write_json
from vla_wmrl.types import Rollout

Group = tuple[Rollout, ...]
Reward = Callable[[Rollout], float]
BOOTSTRAP = 1000


def gradient(learner: Learner, group: Group, reward: Reward) -> torch.Tensor:
    """[P] float32: gradient of the GRPO objective of one group, every rollout weighing the same."""
    rewards = np.array([reward(r) for r in group])
    looks = learner.policy.collate(group, rewards - rewards.mean(), np.ones(len(group), bool))
    live = torch.nonzero(looks.mask).flatten()
    if len(live) == 0:
        return torch.zeros(sum(p.numel() for p in learner.parameters))
    weights = grpo.look_weights(looks.rollout, looks.mask, len(group))
    logp = learner.policy.log_prob(*looks.rows(live))
    loss, _ = grpo.grpo_loss(logp, logp.detach(), looks.advantage[live], weights[live])
    grads = torch.autograd.grad(loss, learner.parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(learner.parameters, grads, strict=True)]
    )


def gradients(learner: Learner, groups: list[Group], reward: Reward) -> torch.Tensor:
    return torch.stack([gradient(learner, group, reward) for group in groups])


def apart(gram: np.ndarray, rows: np.ndarray) -> float:
    """Mean of gram[i, j] over i != j of `rows`; a group drawn twice by the bootstrap is not a second group."""
    return float(gram[np.ix_(rows, rows)][rows[:, None] != rows[None, :]].mean())


def interval(estimate: Callable[[np.ndarray], float], n: int, seed: int = 0) -> list[float]:
    """The estimate over all n groups, with the 2.5 and 97.5 % quantiles over resampled groups."""
    rng = np.random.default_rng(seed)
    draws = [estimate(rng.integers(0, n, n)) for _ in range(BOOTSTRAP)]
    return [estimate(np.arange(n)), *np.quantile(draws, [0.025, 0.975]).tolist()]


def describe(vectors: torch.Tensor) -> dict:
    """Signal and noise of gradients [G, P]."""
    gram = (vectors @ vectors.T).double().numpy()
    signal, noise = interval(lambda rows: apart(gram, rows), len(gram)), float(np.trace(gram) / len(gram))
    return {"groups": len(gram), "with_contrast": int((np.diag(gram) > 0).sum()), "signal": signal, "noise": noise,
            "signal_to_noise": signal[0] / noise, "groups_needed": noise / signal[0] if signal[0] > 0 else -1.0}  # fmt: skip


def start_signal(learner: Learner, groups: list[Group], reward: Reward) -> list[float]:
    """Mean squared gradient of single starts, from halves of their groups that share nothing but the start."""
    half = len(groups[0]) // 2
    one, other = (gradients(learner, part, reward) for part in ([g[:half] for g in groups], [g[half:] for g in groups]))
    products = (one * other).sum(1).double().numpy()
    return interval(lambda rows: float(products[rows].mean()), len(products))


def cosine(real: torch.Tensor, imagined: torch.Tensor) -> list[float]:
    cross, ours, theirs = ((a @ b.T).double().numpy() for a, b in ((real, imagined), (real, real), (imagined, imagined)))

    def estimate(rows: np.ndarray) -> float:
        squared = apart(ours, rows) * apart(theirs, rows)
        return apart(cross, rows) / squared**0.5 if squared > 0 else float("nan")

    return [apart(cross, np.arange(len(cross))), *interval(estimate, len(cross))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=90)
    parser.add_argument("--output", default="results/gradient_signal/summary.json")
    args, rest = parser.parse_known_args()
    cfg = arguments.load(TrainConfig, rest)
    with make_pool(cfg.workers) as pool:
        run = Run(cfg, pool)
        conjuncts = {task: len(spec.goal) for task, spec in task_specs(pool, run.specs).items()}
        run.collect_starts()
        starts = run.starts.draw(0, args.groups)
        groups = run.executor(starts, cfg.grpo.group_size, (cfg.seed, 0)).result()
    imagined = [] if run.world is None else imagine_groups(
        run.world.model, run.policy, starts, cfg.grpo.group_size, (cfg.seed, 0), cfg.groups
    )
    learner, found = run.loop.learner, {}
    for name in ("progress", "stage", "milestone", "success"):
        reward: Reward = (lambda r: float(r.success)) if name == "success" else branch_reward(name, conjuncts)
        real = gradients(learner, groups, reward)
        found[name] = {"real": describe(real), "start_signal": start_signal(learner, groups, reward)}
        if imagined:
            dreamt = gradients(learner, imagined, reward)
            found[name] |= {"imagined": describe(dreamt), "cross_and_cosine": cosine(real, dreamt)}
        print(name, found[name], flush=True)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in arguments.encode(cfg).items() if k != "output_dir"}
    write_json(args.output, {"config": settings, "forms": found})


if __name__ == "__main__":
    main()
