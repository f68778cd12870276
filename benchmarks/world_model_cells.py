"""Real and imagined rollouts of several policies from the same held-out starts, with the same noise keys (gate b).

Starts are branch starts that the first policy passes through, spread over its rollouts. Of every rollout: success, the gain of
progress, and whether the next milestone is passed within `--decided` looks, which is what RL pays a branch for. Run:

    python benchmarks/world_model_cells.py --world_model=DIR --policies=CKPT@0.0,CKPT@0.5,OTHER@0.0 --task_ids=0,1,7 \
        --inits=150:160 --members=8 --looks=40 --output=cells.npz
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim.execute import NO_LIMIT
from sim.imagine import task_specs
from sim.libero import EnvSpec
from sim.rewards import mark, passes
from sim.rollout import PolicyRef, RolloutJob
from sim.workers import Pool
from vla_wmrl.policies.flow import FlowPolicy
from vla_wmrl.types import Rollout, Start
from vla_wmrl.world_model.latent import StateSpaceModel

SEED = (77,)


def branch_starts(
    pool: Pool, specs: dict[int, EnvSpec], inits: range, policy: PolicyRef, each: int, conjuncts: dict[int, int]
) -> list[Start]:
    """`each` starts of one rollout per (task, init), evenly spread over it, with the milestones that it had passed by then."""
    jobs = [
        RolloutJob(spec, (Start(task, i),), (0,), policy, SEED, keep_starts=True, width=1)
        for task, spec in specs.items()
        for i in inits
    ]
    found = []
    for recorded in pool.map(jobs):
        every = mark(recorded[0].starts, recorded[0].rollout.progress, conjuncts[recorded[0].rollout.start.task_id])
        found += [every[k] for k in np.linspace(0, len(every) - 1, each + 2).astype(int)[1:-1]]
    return found


def outcome(rollout: Rollout, looks: int, conjuncts: dict[int, int]) -> dict[str, float]:
    """Success, gain of stage progress, and passing of the next milestone within `looks` (1 or 0)."""
    path = rollout.progress
    next_one = passes(rollout.start, float(max(path[1 : looks + 1])), conjuncts[rollout.start.task_id])
    return {"": float(rollout.success), "_gain": float(path[-1] - path[0]), "_passed": float(next_one)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_model", required=True)
    parser.add_argument("--policies", required=True, help="checkpoint@eta, separated by commas")
    parser.add_argument("--task_ids", default="0")
    parser.add_argument("--inits", default="150:160")
    parser.add_argument("--starts_each", type=int, default=3)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--looks", type=int, default=8)
    parser.add_argument("--decided", type=int, default=8, help="looks within which a branch passes its next milestone, or not")
    parser.add_argument("--noise", action=argparse.BooleanOptionalAction, default=False, help="the dynamics' own noise")
    parser.add_argument("--image_size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = StateSpaceModel.from_pretrained(args.world_model)
    first, last = (int(n) for n in args.inits.split(":"))
    specs = {
        int(t): EnvSpec(task_id=int(t), image_size=args.image_size, stepping="fast", lod_mm=8.0, multisample=0)
        for t in args.task_ids.split(",")
    }
    names = args.policies.split(",")
    refs = {n: PolicyRef(n.rsplit("@", 1)[0], eta=float(n.rsplit("@", 1)[1])) for n in names}
    rows: defaultdict[str, list] = defaultdict(list)
    with Pool(args.workers) as pool:
        conjuncts = {task: len(spec.goal) for task, spec in task_specs(pool, specs).items()}
        starts = branch_starts(pool, specs, range(first, last), refs[names[0]], args.starts_each, conjuncts)
        members = tuple(range(args.members))
        for name, ref in refs.items():
            begun = time.monotonic()
            jobs = [
                RolloutJob(
                    specs[s.task_id], (s,) * len(members), members, ref, SEED, max_looks=args.looks, max_steps=NO_LIMIT, width=8
                )
                for s in starts
            ]
            real = [outcome(r.rollout, args.decided, conjuncts) for recorded in pool.map(jobs) for r in recorded]
            middle = time.monotonic()
            policy = FlowPolicy.from_pretrained(ref.path, ref.eta, ref.sde)
            every = [s for s in starts for _ in members]
            twins = model.imagine(policy, every, list(members) * len(starts), SEED, args.looks, noisy=args.noise)
            imagined = [outcome(r, args.decided, conjuncts) | {"": r.p_success} for r in twins]
            for k, start in enumerate(starts):
                mine = range(k * len(members), (k + 1) * len(members))
                for key, value in (("policy", name), ("task", start.task_id), ("init", start.init_id), ("look", start.look)):
                    rows[key].append(value)
                for what in imagined[0]:
                    rows[f"real{what}"].append([real[i][what] for i in mine])
                    rows[f"imagined{what}"].append([imagined[i][what] for i in mine])
            seconds = (middle - begun, time.monotonic() - middle)
            print(f"{name}: {len(starts)} starts, real {seconds[0]:.0f} s, imagined {seconds[1]:.0f} s", flush=True)
            np.savez_compressed(args.output, **{k: np.array(v) for k, v in rows.items()})


if __name__ == "__main__":
    main()
