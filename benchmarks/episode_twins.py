"""Whole episodes, real and imagined, of one policy from the same initial states with the same noise keys.

    python benchmarks/world_model_fit.py rollouts --policy=CHECKPOINT --inits=700:716 --eta=0 --rollouts=DIR
    python benchmarks/episode_twins.py --world_model=DIR --policy=CHECKPOINT --rollouts=DIR [--output=FILE.json]

What a world model is worth for a policy shows here before any update: per task, success and best progress for real and
imagined, and how far the twins are apart in the first looks, before anything was touched. A model that looks right open
loop can fail this: a policy reads tenths of a degree off its hand, and a model that is a degree off imagines another
policy (docs/open-questions.md).

Two things can be wrong, the looks and the physics. --look_noise=DIR adds to imagined looks what the decoder leaves out of real
ones; --physics also runs MuJoCo on imagined looks (nothing is rendered): what differs from that is physics, and what differs
between that and real episodes is seeing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim.libero import EnvSpec, LiberoEnv
from sim.rollout import begin, measure
from vla_wmrl.policies.flow import FlowPolicy
from vla_wmrl.stats import wilson
from vla_wmrl.types import Start
from vla_wmrl.world_model.base import OPEN_HAND
from vla_wmrl.world_model.geometry import matrix
from vla_wmrl.world_model.latent import StateSpaceModel
from vla_wmrl.world_model.scene import proprioception

EARLY = (1, 2, 3)  # looks at which twins are compared


def angle_deg(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n] degrees between rotations [n, 6]."""
    trace = (matrix(a).transpose(-1, -2) @ matrix(b)).diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.rad2deg(torch.arccos(((trace - 1) / 2).clamp(-1, 1)))


def compare(model: StateSpaceModel, policy: FlowPolicy, task_id: int, files: list[Path], args: argparse.Namespace) -> dict:
    """A row of the table: one task's episodes beside their twins."""
    real = [np.load(f) for f in files]
    starts = [Start(task_id, int(r["init_id"]), split="train", state=r["states"][0], previous=OPEN_HAND) for r in real]
    twins = model.imagine(
        policy, starts, [0] * len(starts), (args.seed, 7), args.looks, stochastic=False, noisy=args.noise,
        look_noise=bool(args.look_noise),
    )  # fmt: skip
    row = {
        "task_id": task_id,
        "episodes": len(real),
        "noise": args.noise,
        "look_noise": bool(args.look_noise),
        "real_success": float(np.mean([bool(r["success"]) for r in real])),
        "real_interval": wilson(sum(bool(r["success"]) for r in real), len(real)),
        "imagined_success": float(np.mean([t.success for t in twins])),
        "real_best_progress": float(np.mean([r["trace_progress"].max() for r in real])),
        "imagined_best_progress": float(np.mean([t.progress.max() for t in twins])),
    }
    if args.physics:
        env = LiberoEnv(EnvSpec(task_id=task_id, image_size=0, stepping="fast"))
        wins = [episode_on_imagined_looks(env, model, policy, start, args) for start in starts]
        row["same_looks_success"] = float(np.mean(wins))
        env.close()
    for look in EARLY:
        both = [(r["states"][look], t.states[look]) for r, t in zip(real, twins, strict=True)
                if look < min(len(r["states"]), len(t.states))]  # fmt: skip
        (a, _), (b, _) = (model.scenes.read(task_id, np.stack(side)) for side in zip(*both, strict=True))
        row[f"hand_cm_{look}"] = float(100 * (a[:, :3] - b[:, :3]).norm(dim=-1).median())
        row[f"turn_deg_{look}"] = float(angle_deg(a[:, 3:9], b[:, 3:9]).median())
    return row


def episode_on_imagined_looks(env: LiberoEnv, model: StateSpaceModel, policy: FlowPolicy, start: Start, args) -> bool:
    """Success of an episode with MuJoCo's physics and, in the place of images, what the world model shows of its states."""
    begin(env, start)
    for look in range(args.looks):
        state, _ = measure(env)
        shown = [((args.seed, 7, *start.key), look)] if args.look_noise else None
        features = model.decoder(start.task_id, state[None], shown)
        robot, _ = model.scenes.read(start.task_id, state[None])
        inputs = policy.inputs_from_features(features, proprioception(robot), [model.tasks[start.task_id].language])
        chunk = policy.sample(inputs, [(args.seed, 7, *start.key, look, 0)], [False]).actions[0].numpy()
        for action in chunk[: policy.n_action_steps]:
            if env.step(action, sample=False):
                return True
    return False


def episodes(folder: str) -> list[Path]:
    """Files of a policy's episodes without exploration."""
    found = sorted(Path(folder).glob("*_eta0.npz"))
    if not found:
        sys.exit(f"no episode without exploration in {folder}: make some with world_model_fit.py rollouts --eta=0")
    return found


def table(rows: list[dict]) -> str:
    early = ", ".join(map(str, EARLY))
    physics = any("same_looks_success" in r for r in rows)
    lines = [
        f"| task | episodes | success real | {'imagined looks, MuJoCo | ' if physics else ''}imagined | best progress real | "
        f"imagined | hand cm at look {early} | degrees |",
        "|---" * (9 if physics else 8) + "|",
    ]
    for r in rows:
        low, high = r["real_interval"]
        apart = [", ".join(f"{r[f'{what}_{look}']:.2f}" for look in EARLY) for what in ("hand_cm", "turn_deg")]
        same = f"{r['same_looks_success']:.2f} | " if physics else ""
        lines.append(
            f"| {r['task_id']} | {r['episodes']} | {r['real_success']:.2f} [{low:.2f}, {high:.2f}] | {same}"
            f"{r['imagined_success']:.2f} | {r['real_best_progress']:.2f} | {r['imagined_best_progress']:.2f} | "
            f"{apart[0]} | {apart[1]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_model", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--rollouts", required=True, help="what `world_model_fit.py rollouts --eta=0` left")
    parser.add_argument("--looks", type=int, default=65, help="of an imagined episode at most")
    parser.add_argument("--seed", type=int, default=0, help="that of the rollouts")
    parser.add_argument("--noise", action=argparse.BooleanOptionalAction, default=True, help="the dynamics' own noise")
    parser.add_argument("--look_noise", metavar="ROLLOUTS", help="add to imagined looks what the decoder leaves out of these")
    parser.add_argument("--physics", action="store_true", help="also run MuJoCo on the imagined looks")
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = StateSpaceModel.from_pretrained(args.world_model)
    policy = FlowPolicy.from_pretrained(args.policy, eta=0.0)
    for file in episodes(args.look_noise) if args.look_noise else ():
        seen = np.load(file)
        model.decoder.observe(int(seen["task_id"]), seen["states"], seen["features"])
    model.decoder.keep_residuals()
    by_task: dict[int, list[Path]] = {}
    for file in episodes(args.rollouts):
        by_task.setdefault(int(np.load(file)["task_id"]), []).append(file)
    rows = [compare(model, policy, task_id, files, args) for task_id, files in sorted(by_task.items())]
    print(table(rows))
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
