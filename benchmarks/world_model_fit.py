"""Builds a world model: makes near misses and a policy's episodes, fits the dynamics and the feature decoder.

    python benchmarks/world_model_fit.py collect --task_ids=0,1,7 --inits=0:40 --segments=DIR
    python benchmarks/world_model_fit.py collect --task_ids=0,1,7 --inits=150:170 --per_moment=8 \\
        --moments_per_event=1 --segments=DIR
    python benchmarks/world_model_fit.py rollouts --policy=CHECKPOINT --inits=40:64 --eta=0 --rollouts=DIR
    python benchmarks/world_model_fit.py rollouts --policy=CHECKPOINT --inits=64:80 --eta=0.3 --rollouts=DIR
    python benchmarks/world_model_fit.py collect --rollouts=DIR --segments=DIR
    python benchmarks/world_model_fit.py fit --segments=DIR --demos=DIR --rollouts=DIR --updates=3000 --world_model=DIR
    python benchmarks/world_model_fit.py decoder --policy=CHECKPOINT --demos=DIR --scenes=DIR --rollouts=DIR \\
        --updates=2200 --world_model=DIR

Near misses and demonstrations from initial state 150 on are held out: `fit` never reads them. `collect` perturbs what a noisy
expert did, or with --rollouts what a policy did: RL goes where that leads, and presses where a model lets fingers pass.
Each step resumes from what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.world_model_gates import HELD_OUT
from sim.imagine import task_specs
from sim.libero import EnvSpec
from sim.near_misses import ARRAYS, NearMissJob, load_segments, save_segments
from sim.rollout import PolicyRef, RolloutJob, Trace
from sim.workers import Pool
from vla_wmrl import checkpoint
from vla_wmrl.policies.flow import FlowPolicy
from vla_wmrl.types import Start
from vla_wmrl.world_model.base import TaskSpec
from vla_wmrl.world_model.data import load_demonstrations
from vla_wmrl.world_model.latent import StateSpaceModel, task_from_json
from vla_wmrl.world_model.looks import demonstration_looks, scene_looks

PRESS = 0.4  # action units at most, down, on top of what a policy did


def specs_file(folder: Path) -> Path:
    return folder / "tasks.json"


def read_specs(folder: Path) -> dict[int, TaskSpec]:
    return {t.task_id: t for t in map(task_from_json, json.loads(specs_file(folder).read_text()))}


def collect(args: argparse.Namespace) -> None:
    folder = Path(args.segments)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [int(t) for t in args.task_ids.split(",")]
    specs = {t: EnvSpec(task_id=t, image_size=0, stepping="fast") for t in tasks}
    jobs = {file: job for file, job in near_misses(args, specs).items() if not file.exists()}
    with Pool(args.workers) as pool:
        known = read_specs(folder) if specs_file(folder).exists() else {}
        if set(tasks) - set(known):
            known |= task_specs(pool, specs)
            specs_file(folder).write_text(json.dumps([asdict(s) for s in known.values()]))
        begun, total = time.monotonic(), 0
        for done, (index, segments) in enumerate(pool.run(list(jobs.values())), 1):
            if segments:
                save_segments(list(jobs)[index], segments)
            total += len(segments)
            print(f"{done}/{len(jobs)} episodes, {total} segments, {time.monotonic() - begun:.0f} s", flush=True)


def near_misses(args: argparse.Namespace, specs: dict[int, EnvSpec]) -> dict[Path, NearMissJob]:
    """An episode's work by the file that it fills."""
    folder, shape = Path(args.segments), {"moments_per_event": args.moments_per_event, "per_moment": args.per_moment}
    if args.rollouts:
        traces = {file.stem: read_trace(file) for file in sorted(Path(args.rollouts).glob("*.npz"))}
        return {
            folder / f"policy_{name}.npz": NearMissJob(
                specs[t.task_id], (t.init_id,), args.seed, {t.init_id: t.actions}, press=PRESS, **shape
            )
            for name, t in traces.items()
            if t.task_id in specs
        }
    first, last = (int(n) for n in args.inits.split(":"))
    return {
        folder / f"t{task}_i{i}.npz": NearMissJob(spec, (i,), args.seed, **shape)
        for task, spec in specs.items()
        for i in range(first, last)
    }


def fit(args: argparse.Namespace) -> None:
    folder, out = Path(args.segments), Path(args.world_model)
    tasks = read_specs(folder)
    exists = (out / "checkpoints").exists()
    model = StateSpaceModel.from_pretrained(out, tasks, args.seed) if exists else StateSpaceModel(tasks, args.seed)
    _, demos = load_demonstrations(args.demos)
    model.observe([t for t in demos if t.task_id in tasks and t.init_id < HELD_OUT], "expert")
    every = [s.trace for file in sorted(folder.glob("*.npz")) for s in load_segments(file)]
    near = [t for t in every if t.init_id < HELD_OUT]
    model.observe(near, "near_miss")
    own = [read_trace(file) for file in sorted(Path(args.rollouts).glob("*.npz"))] if args.rollouts else []
    run = [trace for folder in filter(None, args.runs.split(",")) for trace in run_traces(Path(folder))]
    model.observe([*own, *run], "policy")
    print(f"{len(demos)} demonstrations, {len(near)} near misses, {len(own)} episodes of a policy, {len(run)} rollouts of runs")
    begun = time.monotonic()

    def log(i: int, horizon: int, losses: dict[str, float]) -> None:
        if i % 50 == 0:
            terms = ", ".join(f"{k} {v:.4f}" for k, v in losses.items())
            print(f"{i} ({horizon} steps): {terms}; {time.monotonic() - begun:.0f} s", flush=True)
        if i % 250 == 249:
            model.save(out)

    model.fit(args.updates, log)
    model.save(out)


def read_trace(file: Path) -> Trace:
    """The control steps of an episode that `rollouts` saved."""
    data = np.load(file)
    if "trace_actions" not in data:
        sys.exit(f"{file} has looks and no control steps: it was made before `rollouts` saved them, make it again")
    arrays = {name: data[f"trace_{name}"] for name in ARRAYS}
    return Trace(int(data["task_id"]), int(data["init_id"]), **arrays)


def run_traces(folder: Path) -> list[Trace]:
    """What a run of `vla-wmrl train` executed: its start episodes and its anchors."""
    newest = checkpoint.latest(folder)
    if newest is None:
        sys.exit(f"no checkpoint of a run in {folder}")
    return [Trace(**fields) for fields in checkpoint.load(newest)["world"]["traces"]]


def rollouts(args: argparse.Namespace) -> None:
    """A policy's own episodes, its failures among them: where the model must be right, and demonstrations never are."""
    folder = Path(args.rollouts)
    folder.mkdir(parents=True, exist_ok=True)
    inits = range(*(int(n) for n in args.inits.split(":")))
    tasks = [int(t) for t in args.task_ids.split(",")]
    specs = {t: EnvSpec(task_id=t, image_size=args.image_size, stepping="fast", lod_mm=8.0, multisample=0) for t in tasks}
    policy = PolicyRef(args.policy, eta=args.eta, sde="smooth", scale=(1, 1, 1, 0, 0, 0, 0))
    size, saved = 4, 0
    jobs = [
        RolloutJob(spec=spec, starts=tuple(Start(task, i) for i in part), members=(0,) * len(part), policy=policy,
                   seed=(args.seed, 7), stochastic=args.eta > 0, width=size, record=True)
        for part in (inits[k : k + size] for k in range(0, len(inits), size))
        for task, spec in specs.items()
    ]  # fmt: skip
    with Pool(args.workers) as pool:
        for _, recorded in pool.run(jobs):
            for r, trace in ((item.rollout, item.trace) for item in recorded):
                file = folder / f"t{r.start.task_id}_i{r.start.init_id}_eta{args.eta:g}.npz"
                np.savez(file, states=r.states[: r.looks], features=r.inputs["features"].astype(np.float16),
                         task_id=r.start.task_id, init_id=r.start.init_id, success=r.success,
                         **{f"trace_{name}": getattr(trace, name) for name in ARRAYS})  # fmt: skip
                saved += 1
            print(f"{saved} episodes", flush=True)


def decoder(args: argparse.Namespace) -> None:
    model = StateSpaceModel.from_pretrained(args.world_model)
    policy = FlowPolicy.from_pretrained(args.policy, eta=0.0)
    looks = [(task, *seen) for task, seen in demonstration_looks(args.demos, policy, args.every).items()]
    looks += scene_looks(args.scenes, policy) if args.scenes else ()
    for file in sorted(Path(args.rollouts).glob("*.npz")) if args.rollouts else []:
        data = np.load(file)
        inits = np.full(len(data["states"]), int(data["init_id"]))
        looks.append((int(data["task_id"]), inits, data["states"], data["features"].astype(np.float32)))
    held_out: dict[int, list] = {}
    for task_id, inits, states, features in looks:
        last = inits % 6 == 3  # a sixth of the initial states checks the fit
        model.decoder.observe(task_id, states[~last], features[~last])
        held_out.setdefault(task_id, []).append((states[last], features[last]))
    model.decoder.nets, model.decoder.residuals = {}, {}  # anew: input scales and components belong to the looks

    def log(task_id: int, i: int, loss: float, gap: float) -> None:
        if i % 100 == 0:
            print(f"task {task_id}, {i}: feature loss {loss:.4f}, action gap {gap:.4f}", flush=True)

    model.fit_decoder(policy, args.updates, log)
    model.save(args.world_model)
    for task_id, pairs in held_out.items():
        states, features = (np.concatenate(column) for column in zip(*pairs, strict=True))
        print(f"task {task_id}, held out: {model.decoder.check(policy, task_id, states, features)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("collect", "rollouts", "fit", "decoder"))
    parser.add_argument("--segments")
    parser.add_argument("--demos")
    parser.add_argument("--world_model")
    parser.add_argument("--rollouts")
    parser.add_argument("--runs", default="", help="fit: folders of `vla-wmrl train`, whose real rollouts are learnt from too")
    parser.add_argument("--eta", type=float, default=0.0, help="noise of the policy's rollouts")
    parser.add_argument("--policy")
    parser.add_argument("--image_size", type=int, default=128, help="pixels of an image's side, as the policy's")
    parser.add_argument("--scenes", help="folder of `vla-wmrl demos --kind=scenes`: more looks for the decoder")
    parser.add_argument("--task_ids", default="0,1,7")
    parser.add_argument("--inits", default="0:40")
    parser.add_argument("--per_moment", type=int, default=4)
    parser.add_argument("--moments_per_event", type=int, default=2)
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--every", type=int, default=4, help="a look at every n-th frame of the demonstrations")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of a fit; fewer where other jobs run")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.step in ("collect", "rollouts") else args.threads)  # workers have the cores
    {"collect": collect, "rollouts": rollouts, "fit": fit, "decoder": decoder}[args.step](args)


if __name__ == "__main__":
    main()
