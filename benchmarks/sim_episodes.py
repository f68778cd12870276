"""Whole episodes in every way of stepping, paired: the same start and the same noise, each mode in closed loop.

    python benchmarks/sim_episodes.py --output_dir results/sim           # all; --part=policy one part only
    python benchmarks/sim.py --output_dir results/sim                    # then puts the rows into equivalence.json

`exact` against robosuite's own `env.step` must agree in success, length and final bits. `near` and `fast` are compared with
`exact` by success: exact McNemar test, discordant counts, bootstrap interval of the paired difference. Parts:
expert     LIBERO-Long's scripted experts with noise 0.3 on positions, states of the train split
suites     the same skills on tasks of the other suites that they fit, official states, noise 0.3
policy     the shipped policy as configs/libero_long.yaml looks (128 pixels, 8 mm, no multisampling), official states
One JSON line an episode and mode in episodes.jsonl (those that are there are skipped), then episodes.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from sim.expert import Expert
from sim.libero import EnvSpec, LiberoEnv
from sim.rollout import PolicyRef, RolloutJob, begin, run
from vla_wmrl.stats import mcnemar, paired_difference
from vla_wmrl.tracking import read_jsonl, write_json
from vla_wmrl.types import Start

NOISE, STREAM = 0.3, 31  # as benchmarks/expert.py
MODES = ("robosuite", "exact", "near", "fast")
LONG = [("libero_10", task_id) for task_id in range(10)]
SHIPPED = [("libero_10", task_id) for task_id in (0, 1, 7)]
OTHERS = [("libero_spatial", 1), ("libero_spatial", 0), ("libero_object", 0), ("libero_object", 5),
          ("libero_goal", 7), ("libero_goal", 8), ("libero_90", 46), ("libero_90", 72)]  # fmt: skip
PARTS = {  # tasks, split, episodes a task in every mode (as MODES): robosuite is slow, so is a policy that looks
    "suites": (OTHERS, "official", (20, 20, 20, 20)),
    "expert": (LONG, "train", (4, 10, 10, 10)),
    "policy": (SHIPPED, "official", (8, 20, 8, 20)),
}
WIDTH = 8  # the policy's episodes side by side


class Skills(Expert):
    """The experts' skills for whatever goal a task has."""

    def __init__(self, suite: str, task_id: int):
        self.task_id = task_id


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:16]


def scripted(env: LiberoEnv, init_ids: list[int], split: str) -> list[tuple[int, bool, int, str]]:
    """(init, success, steps, digest of the last joints and velocities) of the expert's episodes."""
    expert, found = Skills(env.spec.suite, env.spec.task_id), []
    for init_id in init_ids:
        begin(env, Start(env.spec.task_id, init_id, split=split))
        rng = np.random.default_rng([env.spec.task_id, init_id, STREAM])
        success = False
        while env.steps < env.max_steps and not success:
            action = expert.act(env.privileged()).astype(np.float64)
            action[:3] = np.clip(action[:3] + rng.normal(0.0, NOISE, 3), -1.0, 1.0)
            success = env.step(action)
        found.append((init_id, success, env.steps, digest(env.data.qpos, env.data.qvel)))
    return found


def learned(env: LiberoEnv, policy, ref: PolicyRef, init_ids: list[int], split: str) -> list[tuple[int, bool, int, str]]:
    """The same of the policy's episodes, the digest that of all it saw: images, instruction and state of every look."""
    starts = tuple(Start(env.spec.task_id, i, split=split) for i in init_ids)
    job = RolloutJob(env.spec, starts, (0,) * len(starts), ref, (0,), stochastic=False, width=WIDTH)
    return [
        (r.rollout.start.init_id, r.rollout.success, r.rollout.steps, digest(*r.rollout.inputs.values(), r.rollout.states))
        for r in run(env, policy, job)
    ]


def episodes(part: str, path: Path, ref: PolicyRef) -> None:
    tasks, split, counts = PARTS[part]
    policy = ref.build() if part == "policy" else None
    with path.open("a") as file:
        for suite, task_id in tasks:
            for mode, n in zip(MODES, counts, strict=True):
                rows = [
                    r
                    for r in read_jsonl(path)
                    if (r["part"], r["suite"], r["task_id"], r["mode"]) == (part, suite, task_id, mode)
                ]
                done = {r["init_id"] for r in rows}
                todo = [i for i in range(n) if i not in done]
                if not todo:
                    continue
                looks = {"image_size": 128, "lod_mm": 8.0, "multisample": 0} if policy else {"image_size": 0}
                env = LiberoEnv(EnvSpec(suite, task_id, stepping=mode, **looks))
                for first in range(0, len(todo), WIDTH):
                    some = todo[first : first + WIDTH]
                    found = learned(env, policy, ref, some, split) if policy else scripted(env, some, split)
                    for init_id, success, steps, end in found:
                        row = {"part": part, "suite": suite, "task_id": task_id, "init_id": init_id, "split": split,
                               "mode": mode, "success": success, "steps": steps, "end": end}  # fmt: skip
                        file.write(json.dumps(row) + "\n")
                    file.flush()
                env.close()
                print(part, suite, task_id, mode, flush=True)


def same(rows: dict[str, dict], keys: list[tuple]) -> dict:
    """How many of the episodes `keys` agree between exact and robosuite."""
    pairs = [(rows["exact"][k], rows["robosuite"][k]) for k in keys]
    return {
        "mode": "exact", "reference_name": "robosuite's own env.step", "episodes": len(pairs),
        "successes": sum(a["success"] for a, _ in pairs),
        **{f"same_{name}": sum(a[name] == b[name] for a, b in pairs) for name in ("success", "steps", "end")},
    }  # fmt: skip


def paired(rows: dict[str, dict], keys: list[tuple], mode: str) -> dict:
    """Where nothing is discordant, the bootstrap interval is a point: `discordant_at_most` (Clopper-Pearson, 95 %) is not."""
    exact, other = (np.array([rows[m][k]["success"] for k in keys]) for m in ("exact", mode))
    tasks = np.unique([f"{part} {suite} {task_id}" for part, suite, task_id, _ in keys], return_inverse=True)[1]
    difference = paired_difference(exact, other, tasks, resample="episodes")
    return {
        "mode": mode, "reference_name": "exact", "episodes": len(keys), "successes": int(other.sum()),
        "reference_successes": int(exact.sum()), "only_this": int((other & ~exact).sum()),
        "only_reference": int((exact & ~other).sum()), "difference": difference.value, "low": difference.low,
        "high": difference.high, "mcnemar_p": mcnemar(exact, other),
        "discordant_at_most": float(binomtest(int((exact ^ other).sum()), len(keys)).proportion_ci(method="exact").high),
        "same_steps": sum(rows["exact"][k]["steps"] == rows[mode][k]["steps"] for k in keys),
    }  # fmt: skip


def summary(lines: list[dict]) -> list[dict]:
    rows: dict[str, dict] = {mode: {} for mode in MODES}
    for r in lines:
        rows[r["mode"]][r["part"], r["suite"], r["task_id"], r["init_id"]] = r
    both = sorted(rows["exact"].keys() & rows["robosuite"].keys())
    table = []
    for part, suite in [*sorted({k[:2] for k in both}), ("all", "all")]:
        keys = [k for k in both if k[:2] == (part, suite) or part == "all"]
        table.append({"part": part, "suite": suite, "tasks": len({k[1:3] for k in keys})} | same(rows, keys))
    for mode in ("near", "fast"):
        three = sorted(rows["exact"].keys() & rows[mode].keys())
        for part in [*sorted({k[0] for k in three}), "all"]:
            keys = [k for k in three if part in (k[0], "all")]
            table.append({"part": part, "suite": "all", "tasks": len({k[1:3] for k in keys})} | paired(rows, keys, mode))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("results/sim"))
    parser.add_argument("--part", choices=[*PARTS, "all", "none"], default="all")
    parser.add_argument("--policy", default="checkpoints/libero_long/policy")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "episodes.jsonl"
    for part in PARTS if args.part == "all" else [args.part] if args.part != "none" else []:
        episodes(part, path, PolicyRef(args.policy))
    table = summary(read_jsonl(path))
    write_json(args.output_dir / "episodes.json", table)
    for row in table:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
