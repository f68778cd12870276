"""Does training help where it happens? Undisturbed policies, executed from the same real states of another policy's episodes.

    python benchmarks/fresh_starts.py --policies before=CHECKPOINT after=CHECKPOINT \\
        --output=results/fresh_starts/summary.json --config_path=configs/libero_long.yaml --output_dir=outputs/fresh_starts

The first policy runs whole episodes from training states that no run starts from (`--inits`). Of its looks, those count that
follow a milestone (or the beginning) by at most 8 looks and at which an object has yet to be picked up. From a sample of them
every policy runs `--looks` looks with the deterministic sampler: the share that passes the next milestone, paired by state.
An episode's success compounds several such stretches, and its failures go on for hundreds of steps: this is the cheaper and the
more sensitive comparison, and says nothing on its own about success.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim.compose import env_spec, make_pool, policy_ref
from sim.execute import NO_LIMIT, collect
from sim.imagine import task_specs
from sim.rewards import branch_reward, mark
from sim.rollout import RolloutJob
from vla_wmrl import arguments
from vla_wmrl.config import TrainConfig
from vla_wmrl.tracking import write_json

WAITED, WIDTH = 8, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", required=True, help="NAME=CHECKPOINT; the first is compared with")
    parser.add_argument("--inits", default="240:280")
    parser.add_argument("--starts", type=int, default=256)
    parser.add_argument("--looks", type=int, default=12)
    parser.add_argument("--output", default="results/fresh_starts/summary.json")
    args, rest = parser.parse_known_args()
    cfg = arguments.load(TrainConfig, rest)
    specs = {task: env_spec(cfg.env, task) for task in cfg.env.task_ids}
    paths = dict(p.split("=", 1) for p in args.policies)
    refs = {name: policy_ref(replace(cfg.policy, path=path, eta=0.0)) for name, path in paths.items()}
    inits = range(*(int(n) for n in args.inits.split(":")))
    with make_pool(cfg.workers) as pool:
        conjuncts = {task: len(spec.goal) for task, spec in task_specs(pool, specs).items()}
        recorded = collect(pool, specs, next(iter(refs.values())), inits, "train", cfg.seed)
        fresh = []
        for r in recorded:
            goals = conjuncts[r.rollout.start.task_id]
            picked_all = (2 * goals - 1) / (2 * goals) - 1e-6  # afterwards only placing is left
            marked = mark(r.starts[: r.rollout.looks], r.rollout.progress, goals)
            fresh += [s for s in marked if s.waited < WAITED and s.passed < picked_all and round(2 * goals * s.passed) % 2 == 0]
        chosen = np.random.default_rng(cfg.seed).choice(len(fresh), min(args.starts, len(fresh)), replace=False)
        starts = sorted((fresh[i] for i in chosen), key=lambda s: s.key)
        rows, passed = [], {}
        reward = branch_reward("next", conjuncts)
        for name, ref in refs.items():
            jobs = [
                RolloutJob(spec=specs[task], starts=part, members=(0,) * len(part), policy=ref, seed=(cfg.seed, 1),
                           stochastic=False, max_looks=args.looks, until_next=True, max_steps=NO_LIMIT, width=WIDTH)
                for task in specs
                for part in _parts([s for s in starts if s.task_id == task])
            ]  # fmt: skip
            done = [r.rollout for result in pool.map(jobs) for r in result]
            passed[name] = {r.start.key: reward(r) for r in done}
            base = passed[next(iter(refs))]
            gain = np.array([passed[name][k] - base[k] for k in base])
            by = {}
            for r in done:
                by.setdefault(f"task {r.start.task_id}, after {r.start.passed:g}", []).append(reward(r))
            low, high = _interval([k[:2] for k in base], gain)
            rows.append({
                "policy": name, "n": len(base), "passed": float(np.mean(list(passed[name].values()))),
                "gain": float(gain.mean()), "standard_error": float(gain.std() / len(gain) ** 0.5),
                "gain_low": low, "gain_high": high, "episodes": len({k[:2] for k in base}),
                "by": {k: [len(v), float(np.mean(v))] for k, v in sorted(by.items())},
            })  # fmt: skip
            print(rows[-1], flush=True)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    write_json(args.output, {"inits": args.inits, "looks": args.looks, "rows": rows})


def _interval(episodes: list, gain: np.ndarray) -> tuple[float, float]:
    """95 % of the mean gain, bootstrapped over the episodes that the states come from."""
    which = {e: i for i, e in enumerate(dict.fromkeys(episodes))}
    groups = [gain[[i for i, e in enumerate(episodes) if which[e] == k]] for k in range(len(which))]
    rng = np.random.default_rng(0)
    means = [np.concatenate([groups[j] for j in rng.integers(len(groups), size=len(groups))]).mean() for _ in range(2000)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _parts(starts: list, size: int = 16) -> list[tuple]:
    return [tuple(starts[i : i + size]) for i in range(0, len(starts), size)]


if __name__ == "__main__":
    main()
